"""Models with the shapes of a run, and without memory for weights: for a dry run and for a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgather.ml.strategy.meta_model import is_plain, set_tensor, tensors_of

_shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Context manager in which models are built without memory for weights and without communication."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def has_shapes_only() -> bool:
    """Returns whether models are built without memory for weights and without communication."""
    return _shapes_only.get()


def fill_with_fakes(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Replaces the meta tensors of a module by fake ones, with which it can compute shapes without memory.

    It must be called in a `FakeTensorMode`. Tied weights stay tied.

    Args:
        module: the module, which is changed in place.
        device: the device that the fake tensors claim to be on.
    """
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for _, owner, name, old in list(tensors_of(module)):
        if not (isinstance(old, DTensor) or is_plain(old)) or not old.is_meta:
            continue
        if id(old) not in done:
            local = old.to_local() if isinstance(old, DTensor) else old
            new = torch.empty_strided(local.shape, local.stride(), dtype=old.dtype, device=device)
            if not (isinstance(old, nn.Parameter) or new.is_floating_point() or new.is_complex()):
                # A trace computes integers for real: positions and kinds of tokens are looked up in tables.
                new.zero_()
            if isinstance(old, DTensor):
                new = DTensor.from_local(
                    new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
                )
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                new.__dict__.update({key: value for key, value in vars(old).items() if key not in vars(new)})
            done[id(old)] = (old, new)
        set_tensor(owner, name, done[id(old)][1])
