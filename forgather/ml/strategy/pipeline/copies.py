"""Weights that lie in several places: replicas that saw other rows, and the two ends of a tied weight.

Takes parameters with the gradients of this rank; gives each the gradient of the whole model. Keeps true: every copy
ends with the same gradient bit for bit, so that copies stay equal; a tied weight counts once in the norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgather.errors import DistributedError
from forgather.ml.strategy.pipeline.schedules import Placement
from forgather.ml.strategy.pipeline.tied import Tied

_BUCKET_BYTES = 64 * 2**20


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
        local = _local(parameter.grad)
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


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """A weight that several stages use.

    Args:
        copies: the copies that lie here, in the order of their stages.
        ranks: the ranks of the pipeline that hold copies.
    """

    copies: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]


def join_local(stages: Mapping[int, nn.Module], tied: Sequence[Tied]) -> None:
    """Makes copies of a tied weight that lie on this rank one parameter."""
    for weight in tied:
        here = [(stages[index], name) for index, name in weight.copies if index in stages]
        for stage, name in here[1:]:
            owner, _, attribute = name.rpartition(".")
            stage.get_submodule(owner)._parameters[attribute] = here[0][0].get_parameter(here[0][1])


def tied_weights(
    stages: Mapping[int, nn.Module], tied: Sequence[Tied], placement: Placement, group: Any
) -> tuple[list[TiedWeight], set[nn.Parameter]]:
    """Returns the tied weights of which copies lie here, and the copies here that another copy counts for; collective.

    Args:
        stages: the stage modules of this rank by number.
        tied: the weights that several stages hold.
        placement: where all stages lie.
        group: the process group of the pipeline.

    Raises:
        DistributedError: FG766 where two ends of a weight lie in different slices.
    """
    found: list[TiedWeight] = []
    represented: set[nn.Parameter] = set()
    for weight in tied:
        here = {index: stages[index].get_parameter(name) for index, name in weight.copies if index in stages}
        _refuse_unlike(weight, here, group)
        if not any(copy.requires_grad for copy in here.values()):
            continue
        copies = tuple(dict.fromkeys(here.values()))
        ranks = tuple(sorted({placement.rank_of(index) for index, _ in weight.copies}))
        represented |= {copy for copy in copies if copy is not here.get(weight.first[0])}
        found.append(TiedWeight(copies, ranks))
    return found, represented


def _refuse_unlike(weight: Tied, here: Mapping[int, nn.Parameter], group: Any) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [_lies(copy) for copy in here.values()], group=group)
    layouts = sorted({layout for layouts in everyone for layout in layouts})
    if len(layouts) > 1:
        raise DistributedError(
            f"the tied weight {weight.first[1]!r} is sliced in one way at one end of the pipeline and in another "
            "at the other: " + " and ".join(layouts),
            code="FG766",
            hint="give a tp_plan that slices both ends alike, or leave this weight whole",
        )


def _lies(parameter: nn.Parameter) -> str:
    placements = parameter.placements if isinstance(parameter, DTensor) else "whole"
    return f"{tuple(parameter.shape)} {placements}"


@torch.no_grad()
def sum_tied(tied: Sequence[TiedWeight], *, rank: int, group: Any, device: torch.device) -> None:
    """Gives every copy of each tied weight the sum of the gradients of all copies.

    Args:
        tied: the tied weights of which copies lie here.
        rank: this rank's position in the pipeline.
        group: the process group of the pipeline.
        device: where gradients pass from rank to rank.
    """
    for weight in tied:
        for copy in weight.copies:
            if copy.grad is None:
                copy.grad = torch.zeros_like(copy)
        own = _local(weight.copies[0].grad).to(device, copy=True)
        for copy in weight.copies[1:]:
            own += _local(copy.grad).to(device)
        total = _sum_among(own, weight.ranks, rank=rank, group=group)
        for copy in weight.copies:
            _local(copy.grad).copy_(total)


def _sum_among(own: Tensor, ranks: Sequence[int], *, rank: int, group: Any) -> Tensor:
    others = {other: torch.empty_like(own) for other in ranks if other != rank}
    if not others:
        return own
    operations = [dist.P2POp(dist.isend, own, group=group, group_peer=other) for other in others]
    operations += [dist.P2POp(dist.irecv, there, group=group, group_peer=other) for other, there in others.items()]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    # One order on every rank: sums in floating point depend on it.
    parts = [own if other == rank else others[other] for other in sorted(ranks)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "missing gradients were filled in"  # noqa: S101
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
