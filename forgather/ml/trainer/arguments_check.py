"""The door of `TrainingArguments`: names and values are checked here, and nowhere else.

Takes what the user wrote; gives settings under their present names, or an `SettingError`. Keeps true:
nothing is dropped in silence. An old spelling is translated with one warning line; a setting of
transformers that this trainer does not have is refused by name, unless it asks for what happens anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from transformers.training_args import TrainingArguments as TransformersArguments

from forgather.errors import TrainingError, nearest
from forgather.ml.log import get_logger

_log = get_logger(__name__)


class SettingError(TrainingError, ValueError):
    """A training argument that does not exist, or that cannot have this value."""

    code = "FG810"


RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "warmup_ratio": "warmup_steps",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Spellings of other releases of transformers, with the present one."""

_QUIETLY_RENAMED = {"activation_checkpointing", "activation_checkpointing_kwargs"}

_GONE: dict[str, tuple[Any, str]] = {
    "save_safetensors": (True, "weights are always written as safetensors"),
    "overwrite_output_dir": (None, "a run never deletes what an output folder holds; remove the folder by hand"),
    "logging_nan_inf_filter": (None, "a loss that is not finite stops the run"),
    "disable_tqdm": (None, "progress is what callbacks show; leave out ProgressCallback for none"),
    "log_level": (None, "log levels belong to the program, as in logging.getLogger('forgather').setLevel(...)"),
    "use_cache": (None, "a training step fills no cache of keys and values"),
}
"""Settings without a meaning here: the value that asks for what happens anyway (None: any), and why."""

_INSTEAD = {
    "fp16": "set bf16: true",
    "fp16_full_eval": "set bf16: true",
    "bf16_full_eval": "set bf16: true, which covers evaluation too",
    "group_by_length": "pack the rows instead",
    "auto_find_batch_size": "set per_device_train_batch_size",
    "optim_args": "give an optimizer_factory",
    "optim_target_modules": "give an optimizer_factory",
    "do_train": "call train()",
    "do_eval": "set eval_strategy",
    "do_predict": "call evaluate()",
}

TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(TransformersArguments)
}


def present_names(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Returns `given` under present names.

    Args:
        given: settings as the user wrote them.
        known: names that exist.

    Raises:
        SettingError: FG810 for an unknown name, FG811 for a setting that is not available here, FG812
            for one setting given under two names.
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            target = name
        elif name in RENAMED:
            target = RENAMED[name]
            if name not in _QUIETLY_RENAMED:
                _log.warning("TrainingArguments: %r is now %r; %r was taken for it", name, target, value)
            elif value is None:
                continue
        else:
            _refuse(name, value, known)
            continue
        if target in settings:
            raise SettingError(
                f"{target!r} is given twice, once as {name!r}", code="FG812", hint="keep one of them"
            ).about(name)
        settings[target] = value
    return settings


def _refuse(name: str, value: Any, known: frozenset[str]) -> None:
    if name in _GONE:
        harmless, reason = _GONE[name]
        if harmless is None or value == harmless:
            _log.warning("TrainingArguments: %r has no effect: %s", name, reason)
            return
        raise SettingError(f"{name}: {value!r} is not available", code="FG811", hint=reason).about(name)
    if name in TRANSFORMERS_DEFAULTS:
        if value == TRANSFORMERS_DEFAULTS[name] or value is None:
            return
        raise SettingError(
            f"{name!r} is a setting of transformers.Trainer that this trainer does not have (found {value!r})",
            code="FG811",
            hint=_INSTEAD.get(name, "remove it, or train with transformers.Trainer (trainers/hf_trainer.yaml)"),
        ).about(name)
    raise SettingError(
        f"TrainingArguments has no setting {name!r}",
        code="FG810",
        hint=nearest(name, sorted(known | set(RENAMED))) or "see the list in forgather.ml.trainer.args",
    ).about(name)


Check = Callable[[Any], str | None]
"""Tells what was expected where a value does not fit; None where it fits."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def count(minimum: int, *, also: int | None = None) -> Check:
    """Returns a check for whole numbers from `minimum`; `also` is one more accepted value."""

    def check(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and (value >= minimum or value == also) else f"a whole number from {minimum}"

    return check


def number(minimum: float, *, maximum: float = float("inf"), open_end: bool = False) -> Check:
    """Returns a check for numbers of a range; `open_end` leaves the maximum out."""

    def check(value: Any) -> str | None:
        fits = _is_number(value) and minimum <= value <= maximum and not (open_end and value == maximum)
        upper = "" if maximum == float("inf") else f" {'below' if open_end else 'to'} {maximum:g}"
        return None if fits else f"a number from {minimum:g}{upper}"

    return check


def steps(value: Any) -> str | None:
    """Checks a number of steps: whole, or a share of all steps below 1."""
    if _is_number(value) and value > 0 and (value < 1 or value == int(value)):
        return None
    return "a whole number of steps from 1, or a share of all steps between 0 and 1"


def steps_or_zero(value: Any) -> str | None:
    """Checks a number of steps, which may be none at all."""
    return None if _is_number(value) and value == 0 else steps(value)


def flag(value: Any) -> str | None:
    """Checks a yes or no."""
    return None if isinstance(value, bool) else "true or false"


def text(value: Any) -> str | None:
    """Checks a text that is not empty."""
    return None if isinstance(value, str) and value else "a text"


def mapping(value: Any) -> str | None:
    """Checks a mapping with text keys."""
    return None if isinstance(value, Mapping) and all(isinstance(key, str) for key in value) else "a mapping"


def one_of(*choices: str) -> Check:
    """Returns a check for a fixed list of words."""

    def check(value: Any) -> str | None:
        return None if isinstance(value, str) and value in choices else "one of: " + ", ".join(choices)

    return check


def optional(check: Check) -> Check:
    """Returns a check that accepts None too."""
    return lambda value: None if value is None else check(value)


def check_value(name: str, value: Any, check: Check) -> None:
    """Raises FG813 where `value` does not fit."""
    expected = check(value)
    if expected is None:
        return
    hint = f"expected {expected}"
    if isinstance(value, str) and "number" in expected:
        hint += "; a number in quotes is a text"
    message = f"{name} is {repr(value)[:80]}"
    raise SettingError(message, code="FG813", hint=hint, expected=expected, found=value).about(name)
