"""Integer tensors keep their values while all other tensors are fake.

A model decides by the values of its integer inputs how it computes: transformers leaves the attention mask out if no
token is padding, and makes a block mask for packed documents. A trace with fake integers would take another path than
the run, with other memory. Integer tensors are small, so `RealIntegers` computes them for real.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from forgather.ml.planner.operators import DEVICE_OF, EagerMode, has_dtensor, leaves, tensors_in
from forgather.ml.planner.remembered_fakes import run_below

_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FEW_ELEMENTS = 2**10
_MOST_ELEMENTS, _MOST_OF_A_MASK = 2**27, 2**22
"""A result with more elements is fake: to compute it for real takes long, and memory. A mask of attention is a result
that is larger than what it is made of; models decide by the values of smaller ones."""

_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class RealIntegers(EagerMode):  # type: ignore[no-untyped-call]
    """Context manager in which operators on real integer tensors give real integer tensors.

    It is entered after (inside) a `FakeTensorMode(allow_non_fake_inputs=True)`. All other operators give fake tensors.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator: for real if only integers take part."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if has_dtensor(tuple(types)):
            return NotImplemented
        kwargs = kwargs or {}
        if FakeTensor in types and func.overloadpacket not in _INDEXING:
            # Most operators take a fake tensor: nothing of them is real.
            return run_below(func, types, args, kwargs)
        if func.overloadpacket in _INDEXING:
            args = (args[0], _positions(args[1]), *args[2:])
        values = [*leaves((args, kwargs))]
        tensors = [item for item in values if isinstance(item, Tensor)]
        if any(isinstance(item, FakeTensor) for item in tensors) or not (
            _is_of_settings(func, tensors) or _is_of_integers(func, tensors, values)
        ):
            return func(*args, **kwargs)
        largest = _largest_result(tensors)
        is_mask = largest > max((item.numel() for item in tensors), default=0)
        most = _MOST_OF_A_MASK if is_mask else _MOST_ELEMENTS
        if largest > most:
            shapes = func(*args, **kwargs)
            if any(item.numel() > most for item in tensors_in(shapes)):
                return shapes
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _largest_result(tensors: Sequence[Tensor]) -> int:
    """Returns the number of elements of a result that has the largest size of each dimension, as a mask has."""
    sizes = itertools.zip_longest(*(reversed(item.shape) for item in tensors), fillvalue=1)
    return math.prod(max(size) for size in sizes)


def _positions(indices: Sequence[Any]) -> list[Any]:
    """Returns the indices of an operator with real masks as positions: their number is the size of the result."""
    found: list[Any] = []
    for one in indices:
        if isinstance(one, Tensor) and one.dtype is torch.bool and not isinstance(one, FakeTensor):
            with unset_fake_temporarily():
                found += one.nonzero(as_tuple=True)
        else:
            found.append(one)
    return found


def _is_of_settings(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Returns whether an operator makes or takes a short row of real numbers: constructors read settings from it."""
    if func.overloadpacket is torch.ops.aten.linspace:
        return True
    return bool(tensors) and all(item.numel() <= _FEW_ELEMENTS and not item.requires_grad for item in tensors)


def _is_of_integers(func: Any, tensors: Sequence[Tensor], values: Sequence[Any]) -> bool:
    """Returns whether an operator takes real integer tensors, and its result is one too, as far as arguments tell."""
    dtypes = [item for item in values if isinstance(item, torch.dtype)]
    if not all(dtype in _INTEGERS for dtype in dtypes) or any(isinstance(item, float) for item in values):
        return False
    if not tensors:
        # A new tensor, such as positions. Only `arange` makes integers without being asked for them.
        return bool(dtypes) or func.overloadpacket is torch.ops.aten.arange
    return all(item.dtype in _INTEGERS for item in tensors)
