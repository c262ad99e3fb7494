"""The global gradient norm, clipping by this norm, and sums over ranks.

The functions take parameters (plain tensors, or DTensors on one or several meshes) and process groups. They compute the
norm that a single process would compute, and sums of gradients, losses and counts. Every rank gets bit-identical
numbers. A weight that several ranks have is counted once in the norm. Summing does not make the host wait for an
accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from forgather.ml.host_reads import host_can_read


@torch.no_grad()
def grad_norm(
    parameters: Iterable[nn.Parameter], *, pp_group: Any = None, weights_counted_once: Collection[nn.Parameter] = ()
) -> Tensor:
    """Returns the 2-norm of all gradients. Collective: every rank that has a part of the parameters must call it.

    Args:
        parameters: the parameters on this rank. A parameter that is given several times is counted once.
        pp_group: the process group of the ranks with the other stages of a pipeline. None without a pipeline.
        weights_counted_once: the tied parameters that this rank leaves out, because another stage counts its own copy.

    Shapes:
        Returns a scalar tensor.
    """
    left_out = {id(parameter) for parameter in weights_counted_once}
    by_mesh: dict[Any, list[Tensor]] = {}
    device = torch.device("cpu")
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        device = _device_of(parameter)
        if parameter.grad is not None and id(parameter) not in left_out:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter.grad)
    # Norms are computed per mesh: torch refuses to stack DTensors of different meshes.
    norms = [_whole_norm(get_total_norm(grads)) for grads in by_mesh.values()]
    # A stage without gradients does not know the dtype of the others, and all ranks must send the same one.
    unknown = not norms and pp_group is not None
    kind = torch.float64 if unknown or any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    if len(norms) == 1 and pp_group is None:
        return norms[0].to(device, kind)
    # Squares can be added over meshes and stages, norms cannot.
    squares = torch.zeros((), dtype=kind, device=device)
    for norm in norms:
        squares += norm.to(device, kind).square()
    if pp_group is not None:
        squares = squares.to(torch.float64)  # stages may hold weights of different dtypes
        dist.all_reduce(squares, group=pp_group)
    return squares.sqrt().to(kind)


@torch.no_grad()
def share_of_squares(
    parameters: Iterable[nn.Parameter],
    coordinates: Mapping[str, int],
    device: torch.device,
    *,
    weights_counted_once: Collection[nn.Parameter] = (),
) -> Tensor:
    """Returns what this rank adds to the square of the norm of all gradients: summed over all ranks, it is the square.

    The sum can be part of a collective that a step has anyway. Sends nothing, unless a gradient is a DTensor of partial
    sums, which every rank of its mesh then completes.

    Args:
        parameters: the parameters on this rank. A parameter that is given several times is counted once.
        coordinates: the coordinate of this rank on each axis along which ranks may have the same gradients, by name.
        device: the device of the result.
        weights_counted_once: the tied parameters that this rank leaves out, because another stage counts its own copy.

    Shapes:
        Returns a scalar tensor, in float64.
    """
    left_out = {id(parameter) for parameter in weights_counted_once}
    is_first = not any(coordinates.values())
    by_device: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        gradient, counts = parameter.grad, is_first
        if isinstance(gradient, DTensor):
            gradient = _without_partial_sums(gradient)
            counts = _counts_here(gradient, coordinates)
        if gradient is not None and counts and id(parameter) not in left_out:
            local = local_part(gradient)
            by_device.setdefault((local.device, local.dtype), []).append(local)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradients in by_device.values():
        norms = torch.stack(torch._foreach_norm(gradients))
        squares += norms.to(device, torch.float64).square().sum()
    return squares


def _without_partial_sums(gradient: DTensor) -> DTensor:
    """Returns a gradient of which no rank has only a part of the sum, as some parallel styles of torch leave it."""
    if not any(place.is_partial() for place in gradient.placements):
        return gradient
    places = [Replicate() if place.is_partial() else place for place in gradient.placements]
    whole: DTensor = gradient.redistribute(placements=places)
    return whole


def _counts_here(gradient: DTensor, coordinates: Mapping[str, int]) -> bool:
    """Returns whether this rank is the first of those that have the same part of a gradient."""
    axes = gradient.device_mesh.mesh_dim_names or ()
    sharded = {axis for axis, placement in zip(axes, gradient.placements, strict=True) if not placement.is_replicate()}
    return all(place == 0 for axis, place in coordinates.items() if axis not in sharded)


@torch.no_grad()
def clip_grads(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients so that their norm is at most `max_norm`.

    Args:
        parameters: the parameters on this rank. A parameter that is given several times is scaled once.
        norm: the norm of all gradients.
        max_norm: the largest norm. Infinity leaves the gradients unchanged.

    Shapes:
        norm: a scalar tensor.

    Source:
        `torch.nn.utils.clip_grads_with_norm_`, which refuses DTensors of different meshes.
    """
    # Nothing to clip, and infinity divided by an infinite norm would be NaN.
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


def _whole_norm(norm: Tensor) -> Tensor:
    if not isinstance(norm, DTensor):
        return norm
    mesh = norm.device_mesh
    local = norm.to_local()
    # Gradients of offloaded weights are on the CPU, where the group of an accelerator cannot reduce.
    if local.device.type != mesh.device_type:
        norm = DTensor.from_local(local.to(mesh.device_type), mesh, norm.placements, run_check=False)
    whole: Tensor = norm.full_tensor()
    return whole


def _device_of(parameter: nn.Parameter) -> torch.device:
    if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
        return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
    return parameter.device


BUCKET_BYTES = 64 * 2**20


def sum_over_group(value: Any, group: Any, device: torch.device) -> Any:
    """Returns the sum of a number or tensor over the ranks of a process group.

    If the value is a tensor, a tensor is returned. If it is a Python number, a Python number is returned on the CPU,
    and a scalar tensor on an accelerator, so that the host does not wait.

    Args:
        value: the value on this rank.
        group: the process group. None for all ranks.
        device: the device that the group communicates on.

    Shapes:
        value: any shape, the same on every rank. Returns the same shape.
    """
    if isinstance(value, Tensor):
        total = value.detach().to(device, copy=True)
        dist.all_reduce(total, group=group)
        return total
    whole = isinstance(value, int)
    total = torch.tensor(value, dtype=torch.int64 if whole else torch.float64, device=device)
    dist.all_reduce(total, group=group)
    if host_can_read(device):
        return total.item()
    return total if whole else total.float()


def sum_bucket_async(gradients: Tensor, group: Any) -> torch.futures.Future[Tensor]:
    """Starts an all-reduce that sums a bucket of gradients over a process group, and returns its future.

    DDP itself would take the mean. Multiplying a mean by the number of ranks would round, unless that number is a power
    of two.

    Args:
        gradients: the flat gradients in one DDP bucket, which are summed in place.
        group: the process group of DDP.

    Shapes:
        gradients: (N,).
    """
    # What `dist.all_reduce` calls after its checks of the arguments, which would cost as much as the call itself.
    work: Any = group.allreduce([gradients])
    sums: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return sums


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: Any, device: torch.device) -> None:
    """Sums the gradients over the ranks of a process group in place. A missing gradient is treated as zero.

    Args:
        parameters: the parameters, which must be the same and in the same order on every rank.
        group: the process group of data-parallel or tensor-parallel ranks.
        device: the device that the group communicates on.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local = local_part(parameter.grad)
        bucket = buckets.setdefault((local.dtype, local.device), [])
        bucket.append(local)
        # Buckets bound the memory of the flat copy, and one collective per bucket is faster than one per parameter.
        if sum(tensor.nbytes for tensor in bucket) >= BUCKET_BYTES:
            _sum_bucket(buckets.pop((local.dtype, local.device)), group, device)
    for bucket in buckets.values():
        _sum_bucket(bucket, group, device)


def _sum_bucket(gradients: Sequence[Tensor], group: Any, device: torch.device) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(device)
    dist.all_reduce(flat, group=group)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


class GradientSums:
    """Sums of gradients over a process group that run while backward passes go on.

    Large gradients are summed in place, so that the sums take no further memory. The gradients must not be used between
    `start` and `finish`.

    Args:
        group: the process group of data-parallel ranks.
        device: the device that the group communicates on.
        small_bytes: gradients of fewer bytes, such as those of norms, are sent together.
    """

    def __init__(self, group: Any, device: torch.device, *, small_bytes: int = 2**20) -> None:
        self._group, self._device, self._small_bytes = group, device, small_bytes
        self._works: list[Any] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._started: set[nn.Parameter] = set()

    @torch.no_grad()
    def start(self, parameters: Iterable[nn.Parameter]) -> None:
        """Starts to sum the gradients of some parameters. A missing gradient is treated as zero.

        Args:
            parameters: the parameters, which must be the same and in the same order on every rank.
        """
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            self._started.add(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            if gradient.nbytes < self._small_bytes:
                small.setdefault((gradient.dtype, gradient.device), []).append(gradient)
                continue
            sent = gradient.to(self._device).contiguous()
            if sent is not gradient:
                self._copies.append((gradient, sent))
            self._send(sent)
        for gradients in small.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._device)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            self._copies += [(one, part.view_as(one)) for one, part in zip(gradients, parts, strict=True)]
            self._send(flat)

    def _send(self, tensor: Tensor) -> None:
        self._works.append(dist.all_reduce(tensor, group=self._group, async_op=True))

    @torch.no_grad()
    def finish(self) -> set[nn.Parameter]:
        """Waits for the sums that were started, and returns their parameters."""
        for work in self._works:
            work.wait()
        for gradient, sent in self._copies:
            gradient.copy_(sent)
        finished, self._started = self._started, set()
        self._works.clear()
        self._copies.clear()
        return finished


def local_part(gradient: Tensor | None) -> Tensor:
    """Returns the local part of a gradient that is a DTensor, and any other gradient unchanged.

    Shapes:
        gradient: any shape. Returns the local shape of a DTensor, or the same shape.
    """
    assert gradient is not None, "missing gradients were filled in"  # noqa: S101
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
