"""Sums over processes: of numbers that each has a share of, and of gradients that each has a part of.

Takes a group and what this process has; gives the sum, on every process of the group. Keeps true: every process gets
the same sum bit for bit; nothing here waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_BUCKET_BYTES = 64 * 2**20


def summed(value: Any, group: Any, device: torch.device) -> Any:
    """Returns the sum of a number or tensor over a group, of the type that it has.

    A number comes back as a number from the CPU; from an accelerator as a tensor, so that nobody waits for it.
    """
    if isinstance(value, Tensor):
        total = value.detach().to(device, copy=True)
        dist.all_reduce(total, group=group)
        return total
    whole = isinstance(value, int)
    total = torch.tensor(value, dtype=torch.int64 if whole else torch.float64, device=device)
    dist.all_reduce(total, group=group)
    if device.type == "cpu":
        return total.item()
    return total if whole else total.float()


def added(gradients: Tensor, group: Any) -> torch.futures.Future[Tensor]:
    """Adds gradients over a group, meanwhile; torch's own way takes their mean.

    A mean that is multiplied again rounds, wherever the number of processes is no power of two.
    """
    work: Any = dist.all_reduce(gradients, group=group, async_op=True)
    sums: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return sums


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: Any, device: torch.device) -> None:
    """Adds the gradients of all ranks of a group; a gradient that is missing here counts as zero.

    Args:
        parameters: the same ones, in the same order, on every rank.
        group: of replicas or slices.
        device: where the group adds.
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
        if sum(tensor.nbytes for tensor in bucket) >= _BUCKET_BYTES:
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


def local_part(gradient: Tensor | None) -> Tensor:
    """Returns what of a gradient lies here."""
    assert gradient is not None, "missing gradients were filled in"  # noqa: S101
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
