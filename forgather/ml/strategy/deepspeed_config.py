"""The DeepSpeed config: reading, renaming deprecated keys, and filling values in from the training arguments.

`zero_config` takes the value of the training argument `deepspeed` ("auto", the path of a JSON file, or a mapping) and
all training arguments. It returns the complete config for the engine, without importing torch or deepspeed. If both
DeepSpeed and the trainer have a setting, the training argument determines its value: the config may repeat the argument
but must not differ from it. A setting that has no effect is reported.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.errors import Diagnostic, TrainingError
from forgather.ml.strategy.deepspeed_settings import (
    ABSENT,
    AUTO,
    ELSEWHERE,
    ZERO,
    UnknownKey,
    ZeroConfig,
    refuse_differences,
    set_value,
    shared_settings,
    unknown_keys,
    value_of,
)
from forgather.ml.strategy.deepspeed_values import WrongValue, wrong_values
from forgather.source import Span
from forgather.value_text import shown

DEFAULT_STAGE = 2

_MOST_BYTES = 1_000_000
_RENAMED = {
    "allgather_base_size": "allgather_bucket_size",
    "allgather_size": "allgather_bucket_size",
    "reduce_scatter_base_size": "reduce_bucket_size",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
}


def zero_config(asked: Any, args: Any, *, processes: int, on_cpu: bool) -> ZeroConfig:
    """Returns the DeepSpeed config of a run.

    Args:
        asked: the value of the training argument `deepspeed`: "auto", the path of a JSON file, or a mapping.
        args: the training arguments.
        processes: the number of data-parallel ranks.
        on_cpu: True if the run computes on the CPU.

    Raises:
        TrainingError: FG741 if the config cannot be read or has an unknown key, FG742 if a setting differs from the
            training arguments, FG743 if the arguments name another learning rate schedule, FG744 if the config
            requests a feature that this trainer does not have.
    """
    found = _with_current_names(_read(asked))
    _refuse_unknown(found)
    _refuse_elsewhere(found, args, on_cpu=on_cpu)
    found = _filled(found, args, processes, on_cpu=on_cpu)
    refuse_differences(found, list(shared_settings(args, processes)), "the training arguments")
    return found


def written_settings(asked: Any) -> dict[str, Any]:
    """Returns the DeepSpeed config as it is written, under DeepSpeed's current names.

    Args:
        asked: the value of the training argument `deepspeed`: "auto", the path of a JSON file, or a mapping.

    Raises:
        TrainingError: FG741 if the config cannot be read.
    """
    return dict(_with_current_names(_read(asked)).config)


def unknown_settings(asked: Any) -> list[Diagnostic]:
    """Returns one diagnostic for each unknown key in the DeepSpeed config of a trainer from another library.

    If the config cannot be read, the list is empty: the other trainer reports that error itself.
    """
    try:
        found = _read(asked)
    except TrainingError:
        return []
    return [_no_setting(found, unknown) for unknown in unknown_keys(found.config)]


def _read(asked: Any) -> ZeroConfig:
    if isinstance(asked, Mapping):
        # A copy: the config is filled in below, and the mapping belongs to the user's arguments.
        try:
            return ZeroConfig(config=copy.deepcopy(_plain(asked)), source="the deepspeed mapping")
        except RecursionError:
            raise _unusable("deepspeed is nested too deeply", None) from None
    if asked == AUTO or asked is True:
        return ZeroConfig(config={}, source='deepspeed: "auto"')
    if not isinstance(asked, str):
        raise _unusable(f"deepspeed is {shown(asked)}", None, 'give "auto", the path of a JSON file, or a mapping')
    path = Path(asked).expanduser().absolute()
    text = _read_text(path, asked)
    try:
        # Without the hook, `json` silently keeps the last of several equal keys.
        config = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise _unusable(f"{asked} is not JSON: {error.msg}", Span(str(path), error.lineno, error.colno)) from None
    except RecursionError:
        raise _unusable(f"{asked} is nested too deeply", Span(str(path), 1)) from None
    except ValueError as error:
        # A key that is given twice, or a number of thousands of digits.
        raise _unusable(f"{asked} cannot be used: {error}", Span(str(path), 1)) from None
    if not isinstance(config, dict):
        raise _unusable(f"{asked} contains a {type(config).__name__} instead of a mapping", None)
    return ZeroConfig(config=config, source=str(path), text=text)


def _unusable(message: str, span: Span | None, hint: str | None = None) -> TrainingError:
    return TrainingError(message, code="FG741", span=span, hint=hint)


def _read_text(path: Path, asked: str) -> str:
    try:
        # Reading a pipe or a device could block forever.
        if path.exists() and not path.is_dir() and not path.is_file():
            raise OSError(0, "is not a regular file")
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise OSError(0, f"is longer than {_MOST_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unusable(
            f"DeepSpeed's config {asked[:200]!r} cannot be read: {getattr(error, 'strerror', None) or error}",
            None,
            'give the path of a JSON file (relative to the working folder), a mapping, or "auto"',
        ) from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice in one mapping")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _with_current_names(found: ZeroConfig) -> ZeroConfig:
    """Returns the config with deprecated keys renamed to DeepSpeed's current names."""
    config, notes = found.config, []
    # Files written for earlier releases of DeepSpeed have other names.
    if "zero_stage" in config:
        stage = config.pop("zero_stage")
        config.setdefault(ZERO, {})
        if isinstance(config[ZERO], dict):
            config[ZERO].setdefault("stage", stage)
        notes.append(f"zero_stage is read as zero_optimization.stage: {stage!r}")
    section = config.get("activation_checkpointing")
    if isinstance(section, Mapping) and "enabled" in section:
        # A key of configs that other tools wrote; DeepSpeed ignores it.
        config["activation_checkpointing"] = {key: value for key, value in section.items() if key != "enabled"}
        notes.append("activation_checkpointing.enabled has no effect in DeepSpeed: set gradient_checkpointing")
    if "bfloat16" in config and "bf16" not in config:
        config["bf16"] = config.pop("bfloat16")
        notes.append("bfloat16 is read as bf16")
    zero = config.get(ZERO, {})
    if isinstance(zero, bool) or zero == AUTO:
        # Old configs switch ZeRO on and off by a boolean.
        zero = {} if zero else {"stage": 0}
    if not isinstance(zero, dict):
        message = f"zero_optimization is {zero!r:.80}"
        raise _unusable(message, found.line_of(ZERO), "give a mapping with a stage of 1, 2 or 3")
    zero = dict(zero)
    for old, new in _RENAMED.items():
        for holder in (config, zero):
            if old in holder and new not in zero:
                zero[new] = holder.pop(old)
                notes.append(f"{old} is read as {new} of zero_optimization")
    _offload(zero, notes)
    _adam_of(config, notes)
    config[ZERO] = {"stage": DEFAULT_STAGE, **zero} if zero.get("stage") != AUTO else {**zero, "stage": DEFAULT_STAGE}
    return dataclasses.replace(found, config=config, notes=(*found.notes, *notes))


def _adam_of(config: dict[str, Any], notes: list[str]) -> None:
    """Names the optimizer "Adam" AdamW, which it is in DeepSpeed unless the config says otherwise."""
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or str(section.get("type")).lower() != "adam":
        return
    params = section.get("params")
    if not isinstance(params, Mapping) or params.get("adam_w_mode", True):
        config["optimizer"] = {**section, "type": "AdamW"}
        notes.append("optimizer Adam is AdamW in DeepSpeed, unless adam_w_mode is false")


def _offload(zero: dict[str, Any], notes: list[str]) -> None:
    """Converts every spelling of the offloading settings to a mapping with a device."""
    pin = zero.pop("cpu_offload_use_pin_memory", None)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        for name in (old, old.removesuffix("s")):
            if name in zero:
                value = zero.pop(name)
                zero.setdefault(new, bool(value))
                notes.append(f"{name} is read as {new} of zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        value = zero.get(name)
        if isinstance(value, str):
            value = {"device": value}
        if isinstance(value, bool):
            notes.append(f"{name}: {json.dumps(value)} is read as {name}.device: {'cpu' if value else 'none'}")
            value = {"device": "cpu"} if value else {"device": "none"}
        if isinstance(value, dict) and pin is not None:
            value.setdefault("pin_memory", pin)
        if isinstance(value, dict) and value.get("device", "none") in ("none", None):
            value = None
        if value is None:
            zero.pop(name, None)
        else:
            zero[name] = value
    if pin is not None and not zero.keys() & {"offload_optimizer", "offload_param"}:
        notes.append("cpu_offload_use_pin_memory has no effect: nothing is offloaded")


def offloads(config: Mapping[str, Any], what: str) -> bool:
    """Returns whether the optimizer state or the parameters are offloaded from the accelerator.

    Args:
        config: the DeepSpeed config, in which deprecated keys have been renamed.
        what: "optimizer" for the optimizer state, or "param" for the parameters.
    """
    return isinstance(config[ZERO].get(f"offload_{what}"), dict)


def _refuse_unknown(found: ZeroConfig) -> None:
    _raise_all([_no_setting(found, unknown) for unknown in unknown_keys(found.config)])
    _raise_all([_misread(found, wrong) for wrong in wrong_values(found.config) if wrong.keys != (ZERO, "stage")])
    stage = found.config[ZERO]["stage"]
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        hint = "give 1 (optimizer state), 2 (gradients too) or 3 (weights too)"
        raise _unusable(f"the ZeRO stage is {stage!r}", found.line_of(ZERO, "stage"), hint)


def _raise_all(faults: Sequence[Diagnostic]) -> None:
    if faults:
        # All of them are reported together, so that a file is corrected once.
        first, *others = faults
        raise TrainingError(first.message, code=first.code, span=first.span, hint=first.hint, others=others)


def _misread(found: ZeroConfig, wrong: WrongValue) -> Diagnostic:
    return Diagnostic(
        code="FG741",
        message=f"{wrong.keys[-1]} is {wrong.value!r:.80}",
        span=found.line_of(*wrong.keys),
        hint=f"give {wrong.expected}",
    )


def _no_setting(found: ZeroConfig, unknown: UnknownKey) -> Diagnostic:
    *sections, key = unknown.keys
    inside = f" in {unknown.section}" if sections else ""
    return Diagnostic(
        code="FG741",
        message=f"DeepSpeed has no setting {shown(key)}{inside}",
        span=found.line_of(*unknown.keys),
        hint=unknown.hint,
    )


def _refuse_elsewhere(found: ZeroConfig, args: Any, *, on_cpu: bool) -> None:
    config, zero = found.config, found.config[ZERO]
    for key, instead in ELSEWHERE.items():
        section = config.get(key)
        if isinstance(section, Mapping) and section.get("enabled") is False:
            del config[key]
        elif section:
            raise _not_available(f"{key} of DeepSpeed", instead, found.line_of(key))
    given = getattr(args, "explicit", ())
    if config.get("scheduler") and not {"lr_scheduler_type", "lr_scheduler_kwargs"}.isdisjoint(given):
        raise second_schedule(found, f"lr_scheduler_type: {args.lr_scheduler_type}")
    if zero["stage"] == 0:
        raise _not_available(
            "ZeRO stage 0, which is plain data parallelism,", "leave deepspeed out", found.line_of(ZERO, "stage")
        )
    if zero["stage"] < 3 and offloads(config, "param"):
        raise _not_available(
            f"offload_param at ZeRO stage {zero['stage']}",
            "set stage: 3, or leave offload_param out",
            found.line_of("offload_param"),
        )
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        if isinstance(section, dict) and section.get("device") == "nvme":
            raise _not_available(f"{name} to a disk (nvme)", "write device: cpu", found.line_of(name, "device"))
    for name in ("zenflow", "super_offload"):
        if zero.get(name):
            raise _not_available(f"{name} of zero_optimization", "leave it out", found.line_of(name))
    if config.get("gradient_allreduce_op", "mean") != "mean":
        raise _not_available(
            "a gradient_allreduce_op other than mean", "leave it out", found.line_of("gradient_allreduce_op")
        )
    section = config.get("fp16")
    written = section.get("enabled") if isinstance(section, Mapping) else None
    if on_cpu and (written is True or getattr(args, "fp16", False)):
        raise _not_available(
            "fp16 on the CPU",
            "set bf16: true, or leave both out",
            None if written is not True else found.line_of("fp16"),
        )


def _not_available(what: str, instead: str, span: Span | None) -> TrainingError:
    return TrainingError(f"{what} is not available under this trainer", code="FG744", span=span, hint=instead)


def second_schedule(found: ZeroConfig, other: str) -> TrainingError:
    """Returns the error about a run that has two learning rate schedules.

    Args:
        found: the DeepSpeed config, which has one.
        other: what asks for the other one.
    """
    section = found.config["scheduler"]
    kind = section.get("type") if isinstance(section, Mapping) else None
    return TrainingError(
        f"scheduler {kind!r} of DeepSpeed conflicts with the trainer's own ({other}): a run has one learning rate "
        "schedule",
        code="FG743",
        span=found.line_of("scheduler"),
        hint=f"remove one of them: without lr_scheduler_type, {kind} of DeepSpeed is used, with the same rates",
    )


def _filled(found: ZeroConfig, args: Any, processes: int, *, on_cpu: bool) -> ZeroConfig:
    """Returns the config with missing and "auto" values filled in from the training arguments."""
    config, notes = copy.deepcopy(found.config), list(found.notes)
    for setting in shared_settings(args, processes):
        for depth in range(1, len(setting.keys)):
            if value_of(config, setting.keys[:depth]) == AUTO:
                set_value(config, setting.keys[:depth], {})
        if value_of(config, setting.keys) in (ABSENT, AUTO):
            set_value(config, setting.keys, setting.value)
    # The trainer's optimizer steps the slices as it would step any tensors, also offloaded ones.
    config["zero_allow_untested_optimizer"] = True
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    for name in ("offload_optimizer", "offload_param"):
        section = config[ZERO].get(name)
        if on_cpu and isinstance(section, dict) and section.get("device") == "cpu":
            if section.get("pin_memory") is True:
                notes.append(f"{name}.pin_memory is set to false: there is no accelerator to pin memory for")
            section["pin_memory"] = False
    if config[ZERO].get("stage3_gather_16bit_weights_on_model_save") is False:
        notes.append("stage3_gather_16bit_weights_on_model_save: saving gathers whole weights anyway")
    if config.pop("activation_checkpointing", None):
        notes.append("activation_checkpointing is not used: set gradient_checkpointing in the training arguments")
    return dataclasses.replace(found, config=config, notes=tuple(notes))
