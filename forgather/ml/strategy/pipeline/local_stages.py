"""The stages of one rank as one model, and their share of the state of the whole.

Takes stage modules and names of the whole model; gives one module for optimizers and modes, what of the state lies
here, and weights whole on every rank. Keeps true: weights have the names of the whole model, a tied weight its first
one; a state says nothing of stages, so any layout can go on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.ml.strategy.state import whole_tensor


class LocalStages(nn.Module):
    """The stages of this rank.

    Args:
        stages: the stage modules by number.
        aliases: further names of tied weights, with their first names.
        config: that of the whole model.
    """

    def __init__(self, stages: Mapping[int, nn.Module], aliases: Mapping[str, str], config: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in sorted(stages.items())})
        self.aliases = dict(aliases)
        self.config = config

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters under the names of the whole model."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if remove_duplicate and id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                yield self.aliases.get(name, name), parameter

    def named_state(self) -> dict[str, Any]:
        """Returns what of the state of the whole model lies here, a tied weight under its first name alone."""
        held: dict[str, Any] = {}
        for stage in self.stages.values():
            for name, value in stage.state_dict(keep_vars=True).items():
                held.setdefault(self.aliases.get(name, name), value)
        return held


def optimizer_of(local: LocalStages, make: Callable[[nn.Module], Optimizer]) -> Optimizer:
    """Returns the optimizer of the stages of this rank; one of nothing where all of them are frozen."""
    if any(parameter.requires_grad for parameter in local.parameters()):
        return make(local)
    # No optimizer of torch begins without a parameter.
    optimizer = make(nn.ParameterDict({"nothing": nn.Parameter(torch.empty(1, 0))}))
    for group in optimizer.param_groups:
        group["params"] = []
    return optimizer


def whole_state(local: LocalStages, names: Sequence[str], *, group: Any, device: torch.device) -> Iterator[Any]:
    """Yields (name, tensor) of the whole model, in its order, one at a time; collective.

    Args:
        local: the stages of this rank.
        names: names of the state of the whole model.
        group: the process group of the pipeline.
        device: where tensors pass from rank to rank.
    """
    held = local.named_state()
    everyone = _gathered({name: _facts(value) for name, value in held.items()}, group)
    shared: dict[str, Any] = {}
    for name in names:
        first = local.aliases.get(name, name)
        if first not in shared:
            owner = next(rank for rank, known in enumerate(everyone) if first in known)
            value = held[first] if owner == dist.get_rank(group) else None
            value = whole_tensor(value) if isinstance(value, Tensor) else value
            value = _told(value, everyone[owner][first], owner=owner, group=group, device=device)
            if first not in local.aliases.values():
                yield name, value
                continue
            shared[first] = value
        yield name, shared[first]


@dataclass(frozen=True, slots=True)
class _Facts:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _facts(value: Any) -> Any:
    return _Facts(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _gathered(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _told(value: Any, facts: Any, *, owner: int, group: Any, device: torch.device) -> Any:
    """Returns what the owner holds, on every rank."""
    if not isinstance(facts, _Facts):
        return facts
    if value is None:
        there = torch.empty(facts.shape, dtype=facts.dtype, device=device)
    else:
        there = value.to(device).contiguous()
    if dist.get_world_size(group) > 1:
        dist.broadcast(there, group=group, group_src=owner)
    return there
