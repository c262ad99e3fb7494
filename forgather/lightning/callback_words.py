"""The options of Lightning's callbacks as settings of our trainers.

The input is the name of a callback class of Lightning and the options that differ from its defaults; the output is
added to the words that are being read: our settings, a limit, or a violation. Nothing here imports torch.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Any

from forgather.aliases import alias_of, suggest
from forgather.lightning.durations import seconds_of
from forgather.lightning.option_rules import wrong_options
from forgather.lightning.trainer_words import Reading
from forgather.value_text import is_one_of, shown


def read_callback(reading: Reading, name: str, options: Mapping[str, Any]) -> bool:
    """Reads a callback of Lightning; returns whether it also runs as a callback of our trainers.

    Args:
        reading: the words that have been read so far.
        name: the name of the class, as "ModelCheckpoint".
        options: the options that differ from Lightning's defaults.
    """
    read = _READERS.get(name)
    if read is not None:
        return read(reading, _usable(reading, name, options))
    alias = alias_of("constructor", f"*:{name}", "lightning")
    # Of a progress bar, `enable_progress_bar` says whether there is one.
    instead = (
        "progress is shown by forgather.ml.callbacks:ProgressCallback" if alias and alias.verdict == "same" else ""
    )
    if alias is not None and (instead or alias.verdict == "elsewhere"):
        reading.notes.append(f"{name} has no effect of its own: {instead or alias.why}")
        for option, value in options.items():
            _refuse(reading, name, option, value, "leave it out")
    else:
        # A class that is not in the records is the user's own, or of a newer release.
        why = alias.hint if alias is not None else "write it as a transformers.TrainerCallback"
        reading.refuse("callbacks", why, value=name, message=f"the callback {name} is not available")
    return False


def _refuse(reading: Reading, name: str, option: str, value: Any, hint: str = "") -> None:
    alias = alias_of("inner", f"{name}.{option}")
    hint = hint or (alias.why if alias is not None else suggest("keyword", option, list(_OPTIONS.get(name, ())))) or ""
    message = f"{name}({option}={shown(value)}) is not available"
    reading.refuse("callbacks", hint, value=value, message=message)


def _note_or_refuse(reading: Reading, name: str, options: Mapping[str, Any]) -> None:
    """Answers the options that no reader has used, by their records."""
    for option, value in options.items():
        alias = alias_of("inner", f"{name}.{option}")
        if alias is not None and alias.verdict == "elsewhere":
            reading.notes.append(f"{name}({option}={shown(value)}): {alias.why}")
        else:
            _refuse(reading, name, option, value)


def _usable(reading: Reading, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options whose values have the right type; the others are violations."""
    wrong = dict(wrong_options(name, options))
    for option, expected in wrong.items():
        _wrong(reading, name, option, options[option], expected)
    return {option: value for option, value in options.items() if option not in wrong}


def _wrong(reading: Reading, name: str, option: str, value: Any, expected: str) -> None:
    reading.refuse(
        "callbacks", f"expected {expected}", code="FG813", message=f"{name}({option}={shown(value)})", value=value
    )


# checkpoints


def _read_model_checkpoint(reading: Reading, options: dict[str, Any]) -> bool:
    filename = options.pop("filename", None)
    if filename is not None and "/" in re.sub(r"\{[^{}]*\}", "", str(filename)):
        _refuse(reading, "ModelCheckpoint", "filename", filename, "a name without folders: write the folder in dirpath")
    elif filename is not None and "/" in str(filename) and options.get("auto_insert_metric_name", True):
        hint = (
            "the name of a metric would be a folder: write auto_insert_metric_name=False, and a name before the value"
        )
        _refuse(reading, "ModelCheckpoint", "filename", filename, hint)
    names = {
        name: options.pop(name) for name in ("auto_insert_metric_name", "enable_version_counter") if name in options
    }
    _read_folder(reading, options.pop("dirpath", None))
    monitor, mode = options.pop("monitor", None), options.pop("mode", "min")
    if not is_one_of(mode, ("min", "max")):
        _wrong(reading, "ModelCheckpoint", "mode", mode, '"min" or "max"')
    keeps_newest = bool(options.pop("save_last", None))
    top = options.pop("save_top_k", 1)
    if not isinstance(top, int) or isinstance(top, bool) or not -1 <= top < 2**31:
        _wrong(reading, "ModelCheckpoint", "save_top_k", top, "a whole number from -1")
        top = 1
    when = _interval(reading, options, has_monitor=monitor is not None)
    settings = _kept(monitor, mode, top, when, keeps_newest=keeps_newest)
    if options.pop("save_weights_only", False):
        settings["save_only_model"] = True
    if monitor is None and top > 1:
        reading.notes.append(
            f"ModelCheckpoint(save_top_k={top}) without monitor, which Lightning refuses, keeps the {top} newest ones"
        )
    written = ", ".join(f"{name}: {shown(value)}" for name, value in settings.items())
    reading.set("callbacks", settings, note=f"ModelCheckpoint is {written}")
    _note_or_refuse(reading, "ModelCheckpoint", options)
    # The callback makes the names that the user expects, and skips epochs.
    return bool(filename or names or keeps_newest or when.get("every_n_epochs", 1) > 1)


def _read_folder(reading: Reading, folder: Any) -> None:
    if folder is None:
        return
    root = reading.settings.pop("output_dir", None)
    if root is not None and root != str(folder):
        reading.set(
            "default_root_dir", {"logging_dir": root}, note=f"default_root_dir={shown(root, 300)} is logging_dir"
        )
    reading.set(
        "callbacks", {"output_dir": str(folder)}, note=f"ModelCheckpoint(dirpath={str(folder)!r}) is output_dir"
    )


def _interval(reading: Reading, options: dict[str, Any], *, has_monitor: bool) -> dict[str, Any]:
    """Returns the settings that say when a checkpoint is written, with `every_n_epochs` if it is not a setting."""
    steps, epochs = options.pop("every_n_train_steps", None), options.pop("every_n_epochs", None)
    minutes = options.pop("train_time_interval", None)
    given = {"every_n_train_steps": steps, "every_n_epochs": epochs, "train_time_interval": minutes}
    given = {
        name: value
        for name, value in given.items()
        if value is not None and not is_one_of(value, (0, datetime.timedelta()))
    }
    if len(given) > 1:
        message = f"ModelCheckpoint has {', '.join(given)}"
        reading.refuse("callbacks", "keep one of them", code="FG812", message=message)
    if has_monitor and given and given != {"every_n_epochs": 1}:
        name, value = next(iter(given.items()))
        hint = "with monitor, a checkpoint is written after each validation: set val_check_interval or "
        _refuse(reading, "ModelCheckpoint", name, value, hint + "check_val_every_n_epoch of the Trainer")
    if steps:
        return {"save_strategy": "steps", "save_steps": steps}
    if minutes is not None:
        seconds = seconds_of(minutes)
        if seconds is None or not 0 < seconds <= 10**9:
            _wrong(reading, "ModelCheckpoint", "train_time_interval", minutes, "a timedelta")
            seconds = 60.0
        # The interval in steps never passes, so that only the clock counts.
        return {"save_strategy": "steps", "save_steps": 2**31, "save_minutes": seconds / 60}
    if steps == 0 and epochs in (None, 0) or epochs == 0:
        return {"save_strategy": "no"}
    return {"save_strategy": "epoch", **({"every_n_epochs": epochs} if epochs and epochs > 1 else {})}


def _kept(monitor: str | None, mode: str, top: int, when: Mapping[str, Any], *, keeps_newest: bool) -> dict[str, Any]:
    """Returns the settings that say which checkpoints are written and kept."""
    if top == 0 and not keeps_newest:
        return {"save_strategy": "no"}
    settings = {name: value for name, value in when.items() if name != "every_n_epochs"}
    if monitor is None:
        return settings if top == -1 else {**settings, "save_total_limit": max(top, 1)}
    settings |= {"metric_for_best_model": monitor, "greater_is_better": is_one_of(mode, ("max",))}
    if top > 0:
        settings["save_top_k"] = top
        # Lightning writes the newest one, too, only if it is asked to.
        settings["save_strategy"] = settings["save_strategy"] if keeps_newest else "best"
    elif top == 0:
        settings["save_total_limit"] = 1
    return settings


# others


def _read_early_stopping(reading: Reading, options: dict[str, Any]) -> bool:
    if "monitor" not in options:
        reading.refuse(
            "callbacks", "name the metric: EarlyStopping(monitor=...)", message="EarlyStopping has no monitor"
        )
    if not is_one_of(options.get("mode", "min"), ("min", "max")):
        _wrong(reading, "EarlyStopping", "mode", options["mode"], '"min" or "max"')
    once = reading.words.get("val_check_interval", 1.0) == 1.0 and reading.words.get("check_val_every_n_epoch", 1) == 1
    if options.get("check_on_train_epoch_end") and not once:
        hint = "the metric is compared after each validation: leave it out"
        _refuse(reading, "EarlyStopping", "check_on_train_epoch_end", True, hint)
    return True


def _read_rate_monitor(reading: Reading, options: dict[str, Any]) -> bool:
    reading.notes.append("LearningRateMonitor has no effect of its own: each log line has the learning rate")
    _note_or_refuse(reading, "LearningRateMonitor", options)
    return False


def _read_timer(reading: Reading, options: dict[str, Any]) -> bool:
    duration, interval = options.get("duration"), options.get("interval", "step")
    if duration is not None and seconds_of(duration) is None:
        _wrong(reading, "Timer", "duration", duration, '"DD:HH:MM:SS", a timedelta, or a mapping of its arguments')
    if not is_one_of(interval, ("step", "epoch")):
        _wrong(reading, "Timer", "interval", interval, '"step" or "epoch"')
    return True


def _read_accumulation(reading: Reading, options: dict[str, Any]) -> bool:
    scheduling = options.pop("scheduling", None)
    is_schedule = isinstance(scheduling, Mapping) and all(type(one) is int for one in scheduling)
    if not is_schedule or not scheduling:
        _wrong(reading, "GradientAccumulationScheduler", "scheduling", scheduling, "a mapping as {0: 8, 5: 4}")
        return False
    # Lightning accumulates one batch before the first epoch of the mapping.
    schedule = {**({} if 0 in scheduling else {0: 1}), **scheduling}
    note = f"GradientAccumulationScheduler is accumulate_grad_batches: {schedule}"
    reading.set("callbacks", {"accumulate_grad_batches": schedule}, note=note)
    return False


_READERS: Mapping[str, Callable[[Reading, dict[str, Any]], bool]] = {
    "ModelCheckpoint": _read_model_checkpoint,
    "EarlyStopping": _read_early_stopping,
    "LearningRateMonitor": _read_rate_monitor,
    "Timer": _read_timer,
    "GradientAccumulationScheduler": _read_accumulation,
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {"GradientAccumulationScheduler": ("scheduling",)}
