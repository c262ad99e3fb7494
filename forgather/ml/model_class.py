"""What a model is: the class that the user wrote, its size, and whether its weights are new or quantized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def user_class(model: Any) -> type:
    """Returns the user's class of a model, such as `Net`: `fully_shard` replaces it by a subclass, `FSDPNet`."""
    return next(cls for cls in type(model).__mro__ if not _is_of_fully_shard(cls))


def class_name(model: Any) -> str:
    """Returns the name of the user's class of a model."""
    return user_class(model).__name__


def _is_of_fully_shard(cls: type) -> bool:
    # Compared by name: a model that is not sharded does not need torch's distributed modules.
    return any(base.__name__ == "FSDPModule" and base.__module__.startswith("torch.") for base in cls.__mro__)


def num_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Returns the number of parameters of a model; a tied parameter is counted once.

    Args:
        model: the model. Its weights may be sharded, or on the meta device. For a proxy with the attribute
            `stands_for`, the represented model is counted.
        trainable: True to count only the parameters that are trained.

    Example:
        >>> num_parameters(nn.Linear(2, 3))
        9
    """
    model = getattr(model, "stands_for", model)
    # bitsandbytes packs several values into each element of a weight of 4 bits.
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    packed = {id(layer.weight): layer.in_features * layer.out_features for layer in layers}
    # With DeepSpeed's ZeRO stage 3 a parameter is empty between passes; `ds_numel` is its whole size.
    return sum(
        int(packed.get(id(p), getattr(p, "ds_numel", p.numel())))
        for p in model.parameters()
        if p.requires_grad or not trainable
    )


def is_quantized(model: Any) -> bool:
    """Returns whether transformers has quantized the weights of a model, or loaded weights that were quantized."""
    return getattr(model, "hf_quantizer", None) is not None or bool(getattr(model, "is_quantized", False))


_INITIAL_WEIGHTS = "_forgather_initial_weights"


def note_initial_weights(model: nn.Module, kind: str) -> None:
    """Keeps with a new model how its weights were made, such as "counter-1"."""
    vars(model)[_INITIAL_WEIGHTS] = kind


def initial_weights_of(model: nn.Module) -> str | None:
    """Returns what `note_initial_weights` kept; None for weights that were loaded, or made by one process."""
    found: str | None = vars(getattr(model, "stands_for", model)).get(_INITIAL_WEIGHTS)
    return found


_NEW_WEIGHTS = "_forgather_new_weights"


def note_new_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Keeps with a loaded model the names of the weights that were not in its files, and are random."""
    # Outside of modules and parameters, so that the state of the model does not change.
    vars(model)[_NEW_WEIGHTS] = tuple(sorted(names))


def new_weights_of(model: nn.Module) -> tuple[str, ...]:
    """Returns the names that `note_new_weights` kept; empty if there are none."""
    return tuple(vars(model).get(_NEW_WEIGHTS, ()))
