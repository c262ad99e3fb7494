"""The norm of all gradients, and clipping by it, whatever lies where.

Takes parameters, plain ones and sharded ones (DTensors of one or several meshes); gives the norm that one process would
have measured, the same on every rank. Keeps true: a weight of which several ranks hold copies counts once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


@torch.no_grad()
def norm_of(
    parameters: Iterable[nn.Parameter], *, pp_group: Any = None, weights_counted_once: Collection[nn.Parameter] = ()
) -> Tensor:
    """Returns the 2-norm of the gradients; collective over the ranks that share the parameters.

    Args:
        parameters: those that lie here; each is counted once however often it is given.
        pp_group: the ranks that hold the other stages of a pipeline.
        weights_counted_once: parameters of which another stage counts its copy; they are left out here.
    """
    left_out = {id(parameter) for parameter in weights_counted_once}
    by_mesh: dict[Any, list[Tensor]] = {}
    device = torch.device("cpu")
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        device = _device_of(parameter)
        if parameter.grad is not None and id(parameter) not in left_out:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter.grad)
    # Norms of one mesh at a time: torch refuses to stack those of several.
    norms = [_whole(get_total_norm(grads)) for grads in by_mesh.values()]
    # A stage without gradients does not know the type of the others.
    unknown = not norms and pp_group is not None
    kind = torch.float64 if unknown or any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    if len(norms) == 1 and pp_group is None:
        return norms[0].to(device, kind)
    squares = torch.zeros((), dtype=kind, device=device)
    for norm in norms:
        squares += norm.to(device, kind).square()
    if pp_group is not None:
        squares = squares.to(torch.float64)  # stages may hold weights of different types
        dist.all_reduce(squares, group=pp_group)
    return squares.sqrt().to(kind)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients so that a norm above `max_norm` becomes `max_norm`, as `clip_grads_with_norm_` does."""
    if math.isinf(max_norm):
        return
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_device.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), grads in by_device.items():
        torch._foreach_mul_(grads, coefficient.to(device))


def _whole(norm: Tensor) -> Tensor:
    if not isinstance(norm, DTensor):
        return norm
    mesh = norm.device_mesh
    local = norm.to_local()
    if local.device.type != mesh.device_type:  # of offloaded weights: the group cannot reduce where they lie
        norm = DTensor.from_local(local.to(mesh.device_type), mesh, norm.placements, run_check=False)
    whole: Tensor = norm.full_tensor()
    return whole


def _device_of(parameter: nn.Parameter) -> torch.device:
    if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
        return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
    return parameter.device
