"""The words of a script's mapping: settings of a trainer, objects, and defaults.

The input is the mapping that a script gives as `config`; the output is `ScriptWords`: our settings, the objects by the
block of a config that holds them, and the choices of the script that are neither. A word that is unknown or means
nothing here is an error; None means "not given". Words are translated by the records of `forgather.aliases`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgather.aliases import alias_of, read_aliases
from forgather.errors import TrainingError, nearest
from forgather.rules import Violation, shipped_rules
from forgather.translation import translate
from forgather.value_text import are_equal, is_one_of, shown

TOOL = "seeds"
OBJECTS = {
    "train_dataset": "train_dataset",
    "eval_dataset": "eval_dataset",
    "loss_fn": "loss_fn",
    "data_collator": "data_collator",
    "processing_class": "tokenizer",
    "tokenizer": "tokenizer",
    "optimizer_factory": "optimizer",
    "lr_scheduler_factory": "lr_scheduler",
    "compute_metrics": "compute_metrics",
    "preprocess_logits_for_metrics": "preprocess_logits_for_metrics",
    "adapter": "adapter",
    "callbacks": "callbacks",
    "save_function": "save_function",
}
"""The words whose values are objects, with the block of a config, or the argument of the trainer, that holds them."""
DEFAULTS = {
    "output_dir": "./checkpoints",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "max_grad_norm": 1.0,
    "save_strategy": "steps",
    "save_steps": 1000,
    "logging_steps": 10,
}
"""The settings that a script does not give; those of precision and ZeRO depend on other words."""
DEFAULT_STAGE = 2
_CHECKPOINTING, _SAVE_LOGS, _LOG_DIR = "activation_checkpointing", "save_logs", "log_dir"
_ROWS, _MICRO_BATCHES, _ALL_ROWS = "per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"


@dataclass(frozen=True, kw_only=True)
class ScriptWords:
    """What the mapping of a script asks for.

    Args:
        settings: the settings that the script gives, under our names; nested ones as mappings.
        origins: the word from which each setting comes.
        objects: the objects, by the block or argument that holds them.
        save_logs: whether a `TrainingMonitor` writes the metrics.
        log_dir: the folder of its file; None for the default.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    save_logs: bool = False
    log_dir: str | None = None


def read_words(config: Mapping[str, Any] | None) -> ScriptWords:
    """Returns what the mapping of a script asks for.

    Args:
        config: the mapping; None for an empty one.

    Raises:
        TrainingError: FG810 if a word is unknown; FG811 if it has no counterpart; FG812 if two words set one setting;
            FG813 if a value is not allowed.
    """
    if config is not None and not isinstance(config, Mapping):
        found = f"config is a {type(config).__name__}"
        raise _error(Violation("FG813", found, "config", "give a mapping of words, as {'batch_size': 8}"))
    if unnamed := [name for name in config or {} if not isinstance(name, str)]:
        raise _error(Violation("FG813", f"config has the key {shown(unnamed[0])}", "config", "give words as texts"))
    given = {name: value for name, value in (config or {}).items() if value is not None}
    if not isinstance(given.get("callbacks", ()), list | tuple):
        message = f"callbacks is {shown(given['callbacks'])}"
        raise _error(Violation("FG813", message, "callbacks", "give a list of callbacks", expected="a list"))
    save_logs = _flag(given, _SAVE_LOGS)
    log_dir = given.pop(_LOG_DIR, None) if save_logs else None
    objects: dict[str, Any] = {}
    for name in [name for name in given if name in OBJECTS]:
        block = OBJECTS[name]
        if block in objects:
            raise _error(Violation("FG812", f"{name!r} and another word both set {block!r}", name, "keep one of them"))
        objects[block] = given.pop(name)
    if "optimizer" in given:
        hint = "write DistributedTrainer(model, optimizer, config=config), or give a callable as optimizer_factory"
        raise _error(Violation("FG811", "'optimizer' is no word of the mapping", "optimizer", hint))
    if _CHECKPOINTING in given:
        given[_CHECKPOINTING] = _recomputes(given[_CHECKPOINTING])
    found = translate(given, tool=TOOL, known=_known_settings())
    if found.violations:
        raise _error(found.violations[0])
    settings: dict[str, Any] = {}
    for name, value in found.settings.items():
        *outer, last = name.split(".")
        _merge(settings, last, value, outer)
    return ScriptWords(
        settings=settings,
        origins={name.split(".")[0]: word for name, word in found.origins.items()},
        objects=objects,
        save_logs=save_logs,
        log_dir=log_dir,
    )


def merged_words(own: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the mapping of a script, with the words that its engine brings.

    Args:
        own: the words of the engine.
        config: the mapping of the script; None for an empty one.

    Raises:
        TrainingError: FG812 if both give a word different values.
    """
    if config is not None and not isinstance(config, Mapping):
        found = f"config is a {type(config).__name__}"
        raise _error(Violation("FG813", found, "config", "give a mapping of words, as {'batch_size': 8}"))
    given = {name: value for name, value in (config or {}).items() if value is not None}
    for name, value in own.items():
        if name in given and not are_equal(given[name], value):
            raise TrainingError(
                f"{name} is {shown(given[name], 60)} in the config, and {shown(value, 60)} in the engine",
                code="FG812",
                hint="keep one of them",
            ).about(name)
    return {**own, **given}


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the defaults of a script for those that are not given.

    Args:
        given: the settings that the script gives.
    """
    defaults: dict[str, Any] = dict(DEFAULTS)
    if given.get(_ALL_ROWS) is not None:
        # One of the two follows from the other ones.
        del defaults[_MICRO_BATCHES if _ROWS in given or _MICRO_BATCHES not in given else _ROWS]
    if "save_strategy" in given:
        del defaults["save_steps"]
    if given.get("bf16") is None:
        defaults["fp16"] = True
    # Another way to split the model, or DeepSpeed's own mapping, takes the place of the default stage.
    splits = ("fsdp", "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "split_spec")
    if not any(not is_one_of(given.get(name), (None, False, 1)) for name in splits):
        defaults["deepspeed"] = {"zero_optimization": {"stage": DEFAULT_STAGE}}
    settings = {**defaults, **given}
    # A script falls back to torch where DeepSpeed is missing; a config does not unless it says so.
    if settings.get("deepspeed") is not None:
        settings.setdefault("strict", False)
    deepspeed = settings.get("deepspeed")
    if isinstance(deepspeed, Mapping) and "zero_stage" not in deepspeed:
        zero = deepspeed.get("zero_optimization", {})
        if isinstance(zero, Mapping):
            settings["deepspeed"] = {**deepspeed, "zero_optimization": {"stage": DEFAULT_STAGE, **zero}}
    return settings


def _known_settings() -> set[str]:
    kinds = ("forgather.ml:AccelTrainingArguments", "forgather.ml:PipelineTrainingArguments")
    return {name for kind in kinds for rules in shipped_rules().get(kind, ()) for name in rules.settings}


def _own_words() -> set[str]:
    """Returns the words that a script may use in addition to our settings."""
    translated = {word for word, record in read_aliases()["setting"].items() if TOOL in record["tools"]}
    return {*translated, *OBJECTS, _SAVE_LOGS, _LOG_DIR}


_DEEPEST = 8


def _merge(settings: dict[str, Any], name: str, value: Any, outer: Sequence[str]) -> None:
    """Adds a setting, and each key of a mapping, next to those that other words have set.

    Args:
        settings: the settings so far, which are changed; mappings of the script are copied into it.
        name: the name of the setting in the innermost mapping.
        value: its value.
        outer: the names of the mappings around it.

    Raises:
        TrainingError: FG812 if another word sets another value.
    """
    held, path = settings, [*outer, name]
    for depth, around in enumerate(outer):
        held = held.setdefault(around, {})
        if not isinstance(held, dict):
            message = f"{'.'.join(path)} is given next to {'.'.join(outer[: depth + 1])}: {shown(held, 60)}"
            raise _error(Violation("FG812", message, around, "keep one of them, or write all of it as one mapping"))
    # No setting is nested deeper; a mapping that contains itself is left to the rules, which refuse it.
    is_nested = isinstance(value, Mapping) and len(path) <= _DEEPEST
    if is_nested and isinstance(held.setdefault(name, {}), dict):
        for key, inner in value.items():
            _merge(settings, key, inner, path)
    elif name in held and not are_equal(held[name], value):
        message = f"{'.'.join(path)} is {shown(held[name], 60)} by one word, and {shown(value, 60)} by another"
        raise _error(Violation("FG812", message, path[0], "keep one of them"))
    else:
        held[name] = value


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.pop(name, False)
    if not isinstance(value, bool):
        raise _error(Violation("FG813", f"{name} is {shown(value)}", name, "write True or False", expected="a bool"))
    return value


def _recomputes(value: Any) -> bool:
    """Returns whether activations are recomputed, from a bool or the mapping of DeepSpeed."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping):
        message = f"{_CHECKPOINTING} is {shown(value)}"
        raise _error(Violation("FG813", message, _CHECKPOINTING, "write True, False, or a mapping with 'enabled'"))
    for name, inner in value.items():
        if are_equal(name, "enabled") and not isinstance(inner, bool):
            message = f"{_CHECKPOINTING}.enabled is {shown(inner)}"
            raise _error(Violation("FG813", message, _CHECKPOINTING, "write True or False"))
        if not are_equal(name, "enabled") and inner is not None and inner is not False:
            alias = alias_of("setting", name, TOOL) if isinstance(name, str) else None
            name = name if isinstance(name, str) else shown(name)
            message = f"{_CHECKPOINTING}.{name} is {shown(inner)}, and is not available"
            hint = alias.why if alias is not None and alias.why else f"leave {name} out"
            raise _error(Violation("FG811", message, _CHECKPOINTING, hint))
    return bool(value.get("enabled", True))


def _error(found: Violation) -> TrainingError:
    # The words of a script belong to no tool that has a name.
    message, hint = found.message.replace(f" of {TOOL}", "").replace(f"{TOOL}'s ", ""), found.hint
    if found.code == "FG810":
        message = f"there is no word {found.argument!r}"
        hint = hint or nearest(found.argument, sorted({*_own_words(), *_known_settings()}))
    return TrainingError(message, code=found.code, hint=hint, expected=found.expected, found=found.found).about(
        found.argument
    )
