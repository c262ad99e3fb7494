"""Weights of classes of their own, such as the packed ones of bitsandbytes, that hold fake tensors.

A library makes such a weight by `torch.Tensor._make_subclass`, which refuses fake tensors: they already have a class.
In `packing_fakes`, the weight gets a class that is both. Its parts besides the weight, such as the scales of its
blocks, are attributes that no module lists; `parts_of` finds them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from forgather.ml.losses import LossRule


@contextlib.contextmanager
def packing_fakes() -> Iterator[None]:
    """Context manager in which a fake tensor can become a weight of a class of its own."""
    make = torch.Tensor._make_subclass

    def make_subclass(kind: type[Tensor], data: Tensor, requires_grad: bool = False, **settings: Any) -> Tensor:
        if not isinstance(data, FakeTensor):
            return make(kind, data, requires_grad, **settings)
        mode = data.fake_mode
        with in_kernel_invocation_manager(mode):
            shape = data.detach()
        made: Tensor = FakeTensor.__new__(_fake_kind(kind), mode, shape, data.fake_device)  # type: ignore[type-var]
        return made.requires_grad_(requires_grad)

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del torch.Tensor._make_subclass


@functools.cache
def _fake_kind(kind: type[Tensor]) -> type[Tensor]:
    return kind if issubclass(kind, FakeTensor) else type(kind.__name__, (kind, FakeTensor), {})


def parts_of(model: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors that belong to the weights of a model and are no weights, such as the scales of packed ones.

    Args:
        model: the model. Its modules and weights have objects of bitsandbytes as attributes, and these the tensors.

    Shapes:
        Yields tensors of any shapes.
    """
    left: list[Any] = [value for owner in (*model.modules(), *model.parameters()) for value in _own(owner)]
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) not in seen:
            seen.add(id(value))
            left += _own(value)
            yield from (item for item in vars(value).values() if isinstance(item, Tensor))


def other_models(rule: LossRule) -> Iterator[Tensor]:
    """Yields the weights of models that a loss keeps, such as a teacher.

    Args:
        rule: the rule of the loss.

    Shapes:
        Yields tensors of any shapes.
    """
    for value in vars(rule).values():
        if isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers(), *parts_of(value))


def _own(owner: Any) -> list[Any]:
    """Returns the attributes of an object whose class is one of bitsandbytes, and no module or weight."""
    attributes = list(getattr(owner, "__dict__", {}).values())
    return [
        value
        for value in attributes
        if type(value).__module__.startswith("bitsandbytes") and not isinstance(value, (nn.Module, Tensor))
    ]
