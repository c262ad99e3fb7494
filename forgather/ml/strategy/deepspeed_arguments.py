"""The training arguments that follow from a DeepSpeed config.

The input is training arguments as the user wrote them, with the setting `deepspeed`; the output is the arguments that
only the config has. torch and deepspeed are not imported, so that the check before a run uses the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forgather.errors import TrainingError
from forgather.ml.strategy.deepspeed_config import written_settings
from forgather.ml.strategy.deepspeed_settings import ABSENT, AUTO, value_of

# The keys of the config, and the training argument that has the same meaning.
_ARGUMENTS = {
    ("train_micro_batch_size_per_gpu",): "per_device_train_batch_size",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    ("gradient_clipping",): "max_grad_norm",
    ("bf16", "enabled"): "bf16",
    ("fp16", "enabled"): "fp16",
}
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")


def readable_settings(asked: Any) -> dict[str, Any]:
    """Returns the same as `written_settings`; an empty config if there is none, or if it cannot be read.

    The strategy reports a config that cannot be read.

    Args:
        asked: the value of the training argument `deepspeed`.
    """
    if asked is None or asked == AUTO:
        return {}
    try:
        return written_settings(asked)
    except TrainingError:
        return {}


def implied_settings(given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the training arguments that follow from a DeepSpeed config, and that the user does not give.

    Args:
        given: the training arguments as the user wrote them. None means "not given".

    Yields:
        The key of the config, the name of the training argument, and its value.
    """
    for path, name, value in _arguments_in(given.get("deepspeed")):
        # With a batch size in the arguments, theirs are compared with those of the config.
        is_sized = any(given.get(one) is not None for one in ("global_batch_size", "accumulate_grad_batches"))
        if given.get(name) is None and not (is_sized and name in _SIZES):
            yield path, name, value


def _arguments_in(asked: Any) -> Iterator[tuple[str, str, Any]]:
    config = readable_settings(asked)
    for keys, name in _ARGUMENTS.items():
        value = value_of(config, keys)
        if value not in (ABSENT, AUTO, None) and isinstance(value, int | float):
            yield ".".join(keys), name, value
    both = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total = config.get("train_batch_size")
    # Of the three numbers, the missing one follows; if none is missing, the strategy compares them. The batch size of
    # a mapping is read by `forgather.batch_triangle`.
    if isinstance(total, int) and not isinstance(asked, Mapping) and not all(map(config.get, both)):
        yield "train_batch_size", "global_batch_size", total
    kind, params = optimizer_section(config)
    if kind is None:
        return
    # The defaults are those of DeepSpeed's own optimizers, or of torch's where these are asked for.
    decays = params.get("torch_adam") and kind == "adamw"
    defaults = {"lr": 1e-3, "weight_decay": 0.01 if decays else 0.0}
    for key, name in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if (value := params.get(key, defaults[key])) != AUTO:
            yield f"optimizer.params.{key}", name, value


def optimizer_section(config: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Returns the type of the optimizer in lower case, and its parameters; None and no parameters without one.

    Args:
        config: the DeepSpeed config.
    """
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    params = section.get("params") if isinstance(section, Mapping) else None
    return (kind.lower() if isinstance(kind, str) else None), dict(params) if isinstance(params, Mapping) else {}
