"""What the words of Lightning's `Trainer` mean for our trainers.

The input is the words as plain values, with a `Given` for each strategy, callback and logger; the output is a
`TrainerWords` and a violation for each word that is refused. Nothing here imports torch: `fgcli check` and the
`Trainer` of a script read the same meaning. The functions here read words whose meaning is computed; all others are
read from their records (`forgather.aliases`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forgather.aliases import alias_of
from forgather.errors import nearest
from forgather.lightning.callback_words import read_callback
from forgather.lightning.device_count import LARGEST, device_count, is_whole
from forgather.lightning.durations import seconds_of
from forgather.lightning.logger_words import read_loggers
from forgather.lightning.module_settings import refused_settings
from forgather.lightning.strategy_words import StrategyMeaning, meaning_of_strategy
from forgather.lightning.trainer_words import TOOL, Given, Limits, Reading, TrainerWords, shown_value
from forgather.rule_conditions import misfit
from forgather.rules import Violation
from forgather.value_text import are_equal, is_one_of, shown


def meaning_of(
    words: Mapping[str, Any], count_devices: Callable[[str], int] | None = None
) -> tuple[TrainerWords, list[Violation]]:
    """Returns what the words of Lightning's `Trainer` mean, and a violation for each word that is refused.

    Args:
        words: the words with their values; None means "not given". Objects are given as `Given`.
        count_devices: a function from an accelerator to the number of devices of this machine; None if the machine is
            not known.

    Example:
        >>> found, refused = meaning_of({"max_epochs": 3, "precision": "bf16-mixed"})
        >>> found.settings["num_train_epochs"], found.settings["bf16"], refused
        (3, True, [])
    """
    reading = Reading(words, _READERS, count_devices)
    for word, read in _READERS.items():
        if word in reading.words:
            read(reading, word, reading.words[word])
    _read_processes(reading)
    _read_lengths(reading)
    _read_trial_run(reading)
    reading.violations.extend(refused_settings(list(reading.settings), reading.origins, reading.words))
    _add_defaults(reading)
    limits = Limits(**reading.limits)
    return TrainerWords(
        settings=reading.settings, limits=limits, notes=reading.notes, **reading.rest
    ), reading.violations


# words of one setting


def _read_accumulation(reading: Reading, word: str, value: Any) -> None:
    name = "accumulate_grad_batches" if isinstance(value, Mapping) else "gradient_accumulation_steps"
    reading.set(word, {name: dict(value) if isinstance(value, Mapping) else value})


def _read_log_interval(reading: Reading, word: str, value: Any) -> None:
    reading.set(word, {"logging_strategy": "no"} if is_one_of(value, (0,)) else {"logging_steps": value})


def _read_clip_algorithm(reading: Reading, word: str, value: Any) -> None:
    if not is_one_of(value, ("norm", "value")):
        reading.refuse(word, 'expected "norm" or "value"', code="FG813", message=f"{word} is {shown(value)}")
    limit: Any = reading.words.get("gradient_clip_val")
    is_number = misfit(limit, {"type": "number"}) is None
    if are_equal(value, "value") and is_number and limit > 0:
        # Clipping by the norm is off; the loop of the module clips each number.
        reading.settings["max_grad_norm"] = 0.0
        reading.rest["clip_value"] = float(limit)
        reading.notes.append(
            f"gradient_clip_val={shown(limit)} is the largest absolute value of a number in the gradients"
        )


def _read_limit(reading: Reading, word: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if word == "val_check_interval" and not is_number:
        reading.refuse(word, "give a number of training batches, or a fraction of an epoch")
    elif word == "val_check_interval" and value == 0 and isinstance(value, int):
        reading.refuse(word, "limit_val_batches: 0 turns validation off", code="FG813", message=f"{word} is 0")
    elif not is_number or not 0 <= value <= (1 if isinstance(value, float) else LARGEST):
        hint = "expected a number of batches, or a fraction from 0.0 to 1.0"
        if word != "num_sanity_val_steps" or not is_one_of(value, (-1,)):
            reading.refuse(word, hint, code="FG813", message=f"{word} is {shown(value)}")
    reading.limits[word] = value


def _read_validation_epochs(reading: Reading, word: str, value: Any) -> None:
    if not is_whole(value, 1):
        reading.refuse(word, "expected a whole number from 1", code="FG813", message=f"{word} is {shown(value)}")
    reading.limits[word] = value


def _read_fast_dev_run(reading: Reading, word: str, value: Any) -> None:
    if not isinstance(value, bool) and not is_whole(value, 0):
        reading.refuse(word, "expected true, or a number of batches", code="FG813", message=f"{word} is {shown(value)}")
        return
    reading.limits[word] = value


def _read_length(reading: Reading, word: str, value: Any) -> None:
    if not is_whole(value, -1):
        reading.refuse(
            word, "expected a whole number, or -1 for no limit", code="FG813", message=f"{word} is {shown(value)}"
        )
        return
    reading.limits[word] = value


def _read_max_time(reading: Reading, word: str, value: Any) -> None:
    seconds = seconds_of(value)
    if seconds is None:
        hint = 'expected "DD:HH:MM:SS", a timedelta, or a mapping of its arguments'
        reading.refuse(word, hint, code="FG813", message=f"{word} is {shown(value)}")
        return
    reading.rest["max_seconds"] = seconds
    reading.notes.append(
        f"{word}={shown(value)} ends the run after {seconds:g} seconds, at the end of an optimizer step"
    )


def _read_switch(reading: Reading, word: str, value: Any) -> None:
    allowed = (True, False, "warn") if word == "deterministic" else (True, False)
    if not is_one_of(value, allowed):
        hint = f"expected {', '.join(map(repr, allowed))}"
        reading.refuse(word, hint, code="FG813", message=f"{word} is {shown(value)}")
        return
    reading.rest.setdefault("switches", {})[word] = value
    reading.notes.append(f"{word}={shown(value)} is set in torch for the time of the run")


def _read_progress(reading: Reading, word: str, value: Any) -> None:
    if not isinstance(value, bool):
        reading.refuse(word, "expected true or false", code="FG813", message=f"{word} is {shown(value)}")
    reading.rest["shows_progress"] = value is True


# objects


def _read_callbacks(reading: Reading, word: str, value: Any) -> None:
    every = list(value) if isinstance(value, Sequence) and not isinstance(value, Given | str) else [value]
    reading.rest["callbacks"] = kept = []
    for one in every:
        # A callback of ours, or of transformers, is what it is.
        if not isinstance(one, Given) or read_callback(reading, one.name, one.options):
            kept.append(one)


def _read_plugins(reading: Reading, word: str, value: Any) -> None:
    every = list(value) if isinstance(value, Sequence) and not isinstance(value, Given | str) else [value]
    for one in every:
        name = one.name if isinstance(one, Given) else shown(one, 60)
        alias = alias_of("constructor", f"*:{name}", TOOL)
        if name == "AsyncCheckpointIO":
            reading.set(word, {"async_save": True})
        else:
            why = alias.why if alias else "what a plugin does is a setting here: precision, strategy, async_save"
            reading.refuse(word, why, value=name)


# processes


def _read_strategy(reading: Reading, word: str, value: Any) -> None:
    if isinstance(value, Given):
        if value.name not in STRATEGY_CLASSES:
            alias = alias_of("constructor", f"*:{value.name}", TOOL)
            reading.refuse(word, alias.why if alias else f"expected {', '.join(STRATEGY_CLASSES)}", value=value.name)
            return
        found = meaning_of_strategy(value.name, value.options)
    elif isinstance(value, str):
        record = alias_of("setting", word, TOOL)
        meant = record.values.get(value) if record is not None else None
        if not isinstance(meant, Mapping):
            known = list(record.values) if record is not None else []
            hint = meant if isinstance(meant, str) else nearest(value, known)
            reading.refuse(word, hint or f"expected {', '.join(known)}")
            return
        found = StrategyMeaning(_kind(value), dict(meant))
    else:
        hint = "expected the name of a strategy, or a DDPStrategy, FSDPStrategy or DeepSpeedStrategy"
        reading.refuse(word, hint, code="FG813", message=f"{word} is {shown(value)}")
        return
    reading.rest["strategy"] = found.strategy
    written = value if isinstance(value, str) else f"{value.name}(...)"
    meant_by = ", ".join(f"{name}: {shown_value(setting)}" for name, setting in found.settings.items())
    trainer = "by the number of processes" if found.strategy == "auto" else f"the {found.strategy} strategy"
    reading.set(word, found.settings, note=f"{word}={written} is {trainer}{': ' if meant_by else ''}{meant_by}")
    reading.notes += found.notes
    reading.violations += found.violations
    if found.group:
        reading.rest["group"] = found.group


STRATEGY_CLASSES = ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "SingleDeviceStrategy")


def _kind(name: str) -> str:
    if name == "single_device":
        return "single"
    return next((kind for kind in ("deepspeed", "fsdp", "ddp") if name.startswith(kind)), "auto")


def _read_devices(reading: Reading, word: str, value: Any) -> None:
    count = device_count(value)
    if count is None:
        hint = "give their number, and choose them by the variable CUDA_VISIBLE_DEVICES"
        reading.refuse(word, hint)
        return
    if isinstance(count, int) and not is_whole(count, 1):
        reading.refuse(word, "expected a number of processes from 1", code="FG813", message=f"{word} is {shown(value)}")
        return
    if isinstance(count, int):
        reading.rest["processes_per_node"] = count


def _read_num_nodes(reading: Reading, word: str, value: Any) -> None:
    if not is_whole(value, 1):
        reading.refuse(word, "expected a whole number from 1", code="FG813", message=f"{word} is {shown(value)}")


def _read_processes(reading: Reading) -> None:
    """Chooses the trainer, and counts the processes: Lightning's `devices` are those of one machine."""
    words, rest = reading.words, reading.rest
    accelerator = words.get("accelerator", "auto")
    accelerator = accelerator if isinstance(accelerator, str) else "auto"
    per_node = rest.get("processes_per_node")
    if per_node is None and reading.count_devices is not None:
        per_node = reading.count_devices(accelerator)
    nodes = words.get("num_nodes", 1)
    total = per_node * nodes if per_node is not None and is_whole(nodes, 1) else None
    strategy = rest.get("strategy", "auto")
    if strategy == "auto":
        strategy = "ddp" if total is not None and total > 1 else "single"
    if rest.get("strategy") == "single" and total is not None and total > 1:
        message = f"strategy='single_device' is one process, and devices and num_nodes are {total}"
        reading.refuse("strategy", 'write strategy="ddp", or devices=1', code="FG814", message=message)
    # The single trainer has no loss scaling; the one for several processes also runs in one.
    if strategy == "single" and reading.settings.get("fp16"):
        strategy = "ddp"
    rest |= {"strategy": strategy, "num_processes": total, "processes_per_node": per_node}
    if strategy != "single":
        rest |= {"trainer": "forgather.ml:AccelTrainer", "arguments": "forgather.ml:AccelTrainingArguments"}
    if total is not None and (total > 1 or "devices" in words):
        reading.notes.append(f"devices={per_node} x num_nodes={nodes} are {total} processes, started by torchrun")
    if total is None or total > 1:
        if words.get("sync_batchnorm"):
            why = "convert the module itself: torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)"
            reading.refuse("sync_batchnorm", why)


def _read_without_effect(reading: Reading, word: str, value: Any) -> None:
    alias = alias_of("setting", word, TOOL)
    if not isinstance(value, bool):
        reading.refuse(word, "expected true or false", code="FG813", message=f"{word} is {shown(value)}")
    elif alias is not None:
        reading.notes.append(f"{word}={value} has no effect of its own: {alias.why}")


def _read_sampler(reading: Reading, word: str, value: Any) -> None:
    if not isinstance(value, bool):
        reading.refuse(word, "expected true or false", code="FG813", message=f"{word} is {shown(value)}")
        return
    reading.rest["replaces_samplers"] = value
    whose = "a sampler of its own rows, in place of the loader's" if value else "the sampler of the loader as it is"
    reading.notes.append(f"{word}={value} gives each of several processes {whose}")


# lengths and defaults


def _read_lengths(reading: Reading) -> None:
    limits = reading.limits
    epochs, steps = limits.get("max_epochs"), limits.get("max_steps", -1)
    if epochs is None:
        # Lightning's own rule: 1000 epochs, unless steps or a time end the run.
        epochs = 1000 if steps == -1 and "max_seconds" not in reading.rest else -1
    if epochs == -1 and steps == -1 and "max_seconds" not in reading.rest:
        hint = "give max_epochs, max_steps or max_time: a run here has an end"
        reading.refuse("max_epochs", hint, message="max_epochs=-1 without max_steps is a run without an end")
    limits["max_epochs"], limits["max_steps"] = (None if epochs == -1 else epochs), steps
    if steps == 0 or epochs == 0:
        reading.set("max_steps" if steps == 0 else "max_epochs", {"num_train_epochs": 0})
    elif steps > 0:
        reading.set("max_steps", {"max_steps": steps}, note=_length_note(epochs, steps))
    elif epochs > 0:
        reading.set("max_epochs", {"num_train_epochs": epochs})
    elif "max_seconds" in reading.rest:
        # A large number: max_time ends the run.
        reading.set("max_time", {"num_train_epochs": 1_000_000}, note="max_time alone ends the run")


def _length_note(epochs: int, steps: int) -> str:
    if epochs == -1:
        return f"max_steps={steps} is max_steps: {steps}"
    return f"max_steps={steps} and max_epochs={epochs}: the run ends at the first of them"


def _read_trial_run(reading: Reading) -> None:
    """Reads `fast_dev_run`: a few batches of each loop, without checkpoints, trackers and early stopping."""
    batches = int(reading.limits.get("fast_dev_run", 0))
    if not batches:
        return
    for name in ("save_strategy", "report_to", "max_steps", "num_train_epochs"):
        reading.settings.pop(name, None)
    for name in ("save_steps", "save_top_k", "save_total_limit", "metric_for_best_model", "save_minutes"):
        reading.settings.pop(name, None)
    batch_limits = {f"limit_{kind}_batches": batches for kind in ("train", "val", "test", "predict")}
    reading.limits |= {**batch_limits, "num_sanity_val_steps": 0, "val_check_interval": 1.0, "max_epochs": 1}
    reading.limits |= {"check_val_every_n_epoch": 1, "max_steps": batches}
    note = f"fast_dev_run={batches}: {batches} batches of each loop, without checkpoints, trackers and early stopping"
    reading.set("fast_dev_run", {"save_strategy": "no", "report_to": "none", "max_steps": batches}, note=note)
    callbacks = reading.rest.get("callbacks", [])
    reading.rest["callbacks"] = [
        one for one in callbacks if not (isinstance(one, Given) and one.name in ("ModelCheckpoint", "EarlyStopping"))
    ]


DEFAULTS: Mapping[str, Any] = {
    "max_grad_norm": 0.0,
    "logging_steps": 50,
    "save_strategy": "epoch",
    "report_to": "tensorboard",
}
"""Our settings for the words that are not given, where Lightning's default is not ours."""


def _add_defaults(reading: Reading) -> None:
    given = reading.settings
    added = {name: value for name, value in DEFAULTS.items() if name not in given}
    if "save_strategy" in added:
        # Lightning's own ModelCheckpoint keeps the newest one.
        added["save_total_limit"] = 1
    if "logging_strategy" in given:
        added.pop("logging_steps", None)
    given |= added
    written = ", ".join(f"{name}: {shown_value(value)}" for name, value in added.items())
    if written:
        reading.notes.append(f"not given, so Lightning's defaults: {written}")


_READERS: Mapping[str, Callable[[Reading, str, Any], None]] = {
    "accumulate_grad_batches": _read_accumulation,
    "log_every_n_steps": _read_log_interval,
    "gradient_clip_algorithm": _read_clip_algorithm,
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), _read_limit),
    **dict.fromkeys(("limit_predict_batches", "overfit_batches", "val_check_interval"), _read_limit),
    "num_sanity_val_steps": _read_limit,
    "check_val_every_n_epoch": _read_validation_epochs,
    "fast_dev_run": _read_fast_dev_run,
    **dict.fromkeys(("max_epochs", "max_steps", "min_epochs", "min_steps"), _read_length),
    "max_time": _read_max_time,
    **dict.fromkeys(("deterministic", "benchmark", "detect_anomaly"), _read_switch),
    "enable_progress_bar": _read_progress,
    "use_distributed_sampler": _read_sampler,
    **dict.fromkeys(("inference_mode", "sync_batchnorm"), _read_without_effect),
    "logger": read_loggers,
    "plugins": _read_plugins,
    "strategy": _read_strategy,
    "devices": _read_devices,
    "num_nodes": _read_num_nodes,
    "callbacks": _read_callbacks,
}
"""The words whose meaning is computed; all others are in the records alone."""
