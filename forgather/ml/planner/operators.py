"""What an operator of torch is called with, looked up fast: a trace asks for it at each of its operators.

`torch.utils._pytree` gives the same and takes a quarter of the time of a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE_OF = torch.ops.prim.device.default
"""The operator by which autograd asks for the device of a fake tensor: more than half of all calls in a trace."""


class EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that runs no compiled code, so that torch need not keep its compiler away at each operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def leaves(values: Any) -> Iterator[Any]:
    """Yields the values in nested tuples, lists and dictionaries, which are all that arguments and results are.

    Args:
        values: the arguments or the result of an operator.
    """
    for item in values.values() if isinstance(values, Mapping) else values:
        if isinstance(item, tuple | list | dict):
            yield from leaves(item)
        else:
            yield item


def tensors_in(*values: Any) -> list[Tensor]:
    """Returns the tensors in arguments and results of an operator, in their order.

    Args:
        values: tensors, or nested tuples, lists and dictionaries; other values are ignored.

    Shapes:
        Returns tensors of any shapes.
    """
    return [item for item in leaves(values) if isinstance(item, Tensor)]


@functools.cache
def name_of(func: Any) -> str:
    """Returns the name of an operator without its overload, such as "aten.mm".

    Args:
        func: the operator.
    """
    return str(getattr(func, "overloadpacket", func))


@functools.cache
def has_dtensor(types: tuple[type, ...]) -> bool:
    """Returns whether an operator is called with a DTensor, which computes with its local tensor afterwards.

    Args:
        types: the types of the tensors, as torch gives them to a dispatch mode.
    """
    return any(issubclass(kind, DTensor) for kind in types)
