"""The stages on one rank as one module, their part of the model's state, and tied weights between stages.

Optimizers and training mode need one module, which is `LocalStages`. Its parameters have the names that they have in
the whole model; a tied weight has its first name. The functions yield the whole state on every rank, and sum the
gradients of tied weights. A state does not depend on the cuts, so a run with any layout can resume from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgather.errors import DistributedError
from forgather.ml.distributed.collectives import is_simulated
from forgather.ml.strategy.gradients import local_part
from forgather.ml.strategy.pipeline.schedules import Placement
from forgather.ml.strategy.pipeline.split import SplitPlan
from forgather.ml.strategy.state import whole_tensor


class LocalStages(nn.Module):
    """The stages on this rank, as one module.

    Args:
        stages: the stage modules, by stage number.
        aliases: a mapping of each further name of a tied weight to its first name.
        config: the configuration of the whole model.
    """

    def __init__(self, stages: Mapping[int, nn.Module], aliases: Mapping[str, str], config: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in sorted(stages.items())})
        self.aliases = dict(aliases)
        self.config = config

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their names in the whole model; see `nn.Module` for the arguments."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if remove_duplicate and id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                yield self.aliases.get(name, name), parameter

    def named_state(self) -> dict[str, Any]:
        """Returns the state of these stages by the names of the whole model; a tied weight has its first name only."""
        held: dict[str, Any] = {}
        for stage in self.stages.values():
            for name, value in stage.state_dict(keep_vars=True).items():
                # With a V schedule one rank may hold both ends of a tied weight.
                held.setdefault(self.aliases.get(name, name), value)
        return held


def optimizer_of(local: LocalStages, make: Callable[[nn.Module], Optimizer]) -> Optimizer:
    """Returns the optimizer of the stages on this rank, or an optimizer without parameters if all of them are frozen.

    Args:
        local: the stages on this rank.
        make: a function that returns the optimizer of a module.
    """
    if any(parameter.requires_grad for parameter in local.parameters()):
        return make(local)
    # Optimizers of torch refuse an empty list of parameters, so the parameter of a dummy module is removed afterwards.
    optimizer = make(nn.ParameterDict({"nothing": nn.Parameter(torch.empty(1, 0))}))
    for group in optimizer.param_groups:
        group["params"] = []
    return optimizer


def whole_state(local: LocalStages, names: Sequence[str], *, group: Any, device: torch.device) -> Iterator[Any]:
    """Yields (name, value) for each entry in the whole model's state, in the order of the names, one at a time.

    Collective: every rank of the pipeline must iterate to the end.

    Args:
        local: the stages on this rank.
        names: the names of all entries in the whole model's state, in order.
        group: the process group of the pipeline.
        device: the device that the group communicates on.
    """
    held = local.named_state()
    everyone = _gather_objects({name: _spec(value) for name, value in held.items()}, group)
    shared: dict[str, Any] = {}
    for name in names:
        first = local.aliases.get(name, name)
        if first not in shared:
            owner = next(rank for rank, known in enumerate(everyone) if first in known)
            value = held[first] if owner == dist.get_rank(group) else None
            value = whole_tensor(value) if isinstance(value, Tensor) else value
            value = _broadcast(value, everyone[owner][first], owner=owner, group=group, device=device)
            # Only tied weights are kept, for their further names; any other is freed by the caller.
            if first not in local.aliases.values():
                yield name, value
                continue
            shared[first] = value
        yield name, shared[first]


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _spec(value: Any) -> Any:
    return _TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _gather_objects(value: Any, group: Any) -> list[Any]:
    if is_simulated(group):
        return [value] * dist.get_world_size(group)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _broadcast(value: Any, facts: Any, *, owner: int, group: Any, device: torch.device) -> Any:
    """Broadcasts the owning rank's value; every rank returns it."""
    # Values that are not tensors were gathered with the specs.
    if not isinstance(facts, _TensorSpec):
        return facts
    if value is None:
        there = torch.empty(facts.shape, dtype=facts.dtype, device=device)
    else:
        there = value.to(device).contiguous()
    if dist.get_world_size(group) > 1:
        dist.broadcast(there, group=group, group_src=owner)
    return there


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """One parameter of the model that several stages have a copy of.

    Args:
        copies: (stage, name in that stage) for each stage that has a copy, in the order of the stages.
    """

    copies: tuple[tuple[int, str], ...]

    @property
    def first(self) -> tuple[int, str]:
        """The copy in the earliest stage, which is the one that is counted in the gradient norm."""
        return self.copies[0]


def tied_parameters(model: nn.Module, plan: SplitPlan) -> list[TiedParameter]:
    """Returns the parameters that more than one stage has, in the order of the model.

    Args:
        model: the whole model.
        plan: the cuts of the model.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for same in names.values():
        copies: dict[int, str] = {}
        for index in range(plan.num_stages):
            here = next((name for name in same if plan.holds(index, name)), None)
            if here is not None:
                copies[index] = here
        if len(copies) > 1:
            found.append(TiedParameter(tuple(copies.items())))
    return found


@dataclass(frozen=True, slots=True)
class LocalTiedWeight:
    """The copies of a tied weight on this rank.

    Args:
        copies: the copies on this rank, in the order of their stages.
        ranks: the ranks of the pipeline that have copies.
    """

    copies: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]


def tie_local_copies(stages: Mapping[int, nn.Module], tied: Sequence[TiedParameter]) -> None:
    """Replaces the copies of a tied weight on this rank by a single parameter.

    Args:
        stages: the stage modules on this rank, by stage number.
        tied: the parameters that several stages have.
    """
    for weight in tied:
        # One parameter: the optimizer steps it once, and its gradients add up in the backward pass.
        here = [(stages[index], name) for index, name in weight.copies if index in stages]
        for stage, name in here[1:]:
            owner, _, attribute = name.rpartition(".")
            stage.get_submodule(owner)._parameters[attribute] = here[0][0].get_parameter(here[0][1])


def tied_weights(
    stages: Mapping[int, nn.Module], tied: Sequence[TiedParameter], placement: Placement, group: Any
) -> tuple[list[LocalTiedWeight], set[nn.Parameter]]:
    """Returns the tied weights with copies on this rank, and the copies that this rank must not count in the norm.

    Collective: every rank of the pipeline must call it.

    Args:
        stages: the stage modules on this rank, by stage number.
        tied: the parameters that several stages have.
        placement: the placement of all stages on ranks.
        group: the process group of the pipeline.

    Raises:
        DistributedError: FG766 if the copies of a tied weight are sliced differently.
    """
    found: list[LocalTiedWeight] = []
    represented: set[nn.Parameter] = set()
    for weight in tied:
        here = {index: stages[index].get_parameter(name) for index, name in weight.copies if index in stages}
        # Before the `continue`: it is collective, and every rank must call it for every weight.
        _refuse_different_slices(weight, here, group)
        if not any(copy.requires_grad for copy in here.values()):
            continue
        copies = tuple(dict.fromkeys(here.values()))
        ranks = tuple(sorted({placement.rank_of(index) for index, _ in weight.copies}))
        represented |= {copy for copy in copies if copy is not here.get(weight.first[0])}
        found.append(LocalTiedWeight(copies, ranks))
    return found, represented


def _refuse_different_slices(weight: TiedParameter, here: Mapping[int, nn.Parameter], group: Any) -> None:
    everyone = _gather_objects([_layout_of(copy) for copy in here.values()], group)
    layouts = sorted({layout for layouts in everyone for layout in layouts})
    if len(layouts) > 1:
        raise DistributedError(
            f"the tied weight {weight.first[1]!r} is sliced differently at the two ends of the pipeline: "
            + " and ".join(layouts),
            code="FG766",
            hint="give a tp_plan that slices both ends the same way, or leave this weight whole",
        )


def _layout_of(parameter: nn.Parameter) -> str:
    placements = parameter.placements if isinstance(parameter, DTensor) else "whole"
    return f"{tuple(parameter.shape)} {placements}"


@torch.no_grad()
def sum_tied(tied: Sequence[LocalTiedWeight], *, rank: int, group: Any, device: torch.device) -> None:
    """Sets the gradient of each copy of a tied weight to the sum of the gradients of all copies.

    Collective: every rank that has a copy must call it.

    Args:
        tied: the tied weights with copies on this rank.
        rank: the rank in the pipeline.
        group: the process group of the pipeline.
        device: the device that the group communicates on.
    """
    for weight in tied:
        for copy in weight.copies:
            # A stage that did not use its copy takes part with zeros: the other ranks wait for it.
            if copy.grad is None:
                copy.grad = torch.zeros_like(copy)
        own = local_part(weight.copies[0].grad).to(device, copy=True)
        for copy in weight.copies[1:]:
            own += local_part(copy.grad).to(device)
        total = _sum_among(own, weight.ranks, rank=rank, group=group)
        for copy in weight.copies:
            local_part(copy.grad).copy_(total)


def _sum_among(own: Tensor, ranks: Sequence[int], *, rank: int, group: Any) -> Tensor:
    others = {other: torch.empty_like(own) for other in ranks if other != rank}
    if not others:
        return own
    # One batch in both directions: ranks that send first and receive afterwards could wait for each other.
    operations = [dist.P2POp(dist.isend, own, group=group, group_peer=other) for other in others]
    operations += [dist.P2POp(dist.irecv, there, group=group, group_peer=other) for other, there in others.items()]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    # The parts are summed in the same order on every rank: a sum of floating-point numbers depends on the order, and
    # the copies must stay equal.
    first, *rest = [own if other == rank else others[other] for other in sorted(ranks)]
    total = first.clone()
    for part in rest:
        total += part
    return total
