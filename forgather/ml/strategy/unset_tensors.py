"""The tensors of a model that are unset: they wait for the values of a checkpoint.

`note_unset` keeps their names with the model. After a checkpoint was restored, `refuse_unrestored` raises an error if
one of them has no value. Until then a float is NaN, so that nothing can be computed with it without notice.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from forgather.errors import CheckpointError
from forgather.ml.strategy.meta_model import tensors_of

_NOTE = "_forgather_unset_tensors"


def unset_value(dtype: torch.dtype) -> float | int | bool:
    """Returns what unset elements of a type are: NaN, the smallest integer, or False."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def note_unset(module: nn.Module, names: Collection[str]) -> None:
    """Keeps with a model, or with a part of it, which of its tensors are unset.

    Args:
        module: the model or the part, whose modules have the names of the whole model.
        names: the names of all unset tensors of the model.
    """
    vars(module)[_NOTE] = frozenset(fqn for fqn, *_ in tensors_of(module)).intersection(names)


def has_unset(module: nn.Module) -> bool:
    """Returns whether the weights of a model, or of a part of it, wait for a checkpoint."""
    return _NOTE in vars(module)


def forget_unset(module: nn.Module) -> None:
    """Takes note that the weights of a model, or of a part of it, have values."""
    vars(module).pop(_NOTE, None)


def refuse_unrestored(module: nn.Module, restored: Collection[int]) -> None:
    """Raises an error if a tensor is still unset, and takes note that all have values otherwise.

    Args:
        module: the model, or a part of it, after a checkpoint was restored into it.
        restored: the `id` of each tensor that was read from the checkpoint.

    Raises:
        CheckpointError: FG748 if a tensor is unset.
    """
    if not has_unset(module):
        return
    unset: frozenset[str] = vars(module)[_NOTE]
    for fqn, _, _, tensor in tensors_of(module):
        # A hook of the model may have set what is not read from the checkpoint by name.
        if id(tensor) not in restored and _is_unset(tensor, is_named=fqn in unset):
            raise CheckpointError(
                f"{fqn!r} has no value after the checkpoint was restored: the state of {type(module).__name__} does "
                "not contain it",
                code="FG748",
                hint="set skip_initial_weights_on_resume: false, by which the model is made with its initial weights "
                "first",
            )
    forget_unset(module)


def _is_unset(tensor: Tensor, *, is_named: bool) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_meta or not local.numel():
        return is_named and local.is_meta
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().any())
    return is_named and bool((local == unset_value(local.dtype)).all())
