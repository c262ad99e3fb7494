"""Where to cut so that stages weigh the same.

Takes the costs of what lies before the blocks, of each block, and of what lies after; gives cuts. Keeps true: integers
and sums in one order only, so every rank finds the same cuts; costs are counted on the meta device, not timed, unless
times are given.

A unit weighs the mean of its share of the computation (floating-point operations of a small batch) and its share of
the parameters (memory, optimizer, gradient traffic): an embedding computes nothing and weighs, a head does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from forgather.ml.strategy.pipeline.blocks import BlockList


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What the units of a model weigh, in one unit of any kind.

    Args:
        before: what lies before the blocks.
        blocks: each block.
        after: what lies after the blocks.
    """

    before: float
    blocks: tuple[float, ...]
    after: float

    def of_stages(self, cuts: Sequence[int]) -> list[float]:
        """Returns what each stage weighs."""
        edges = (0, *cuts, len(self.blocks))
        costs = [sum(self.blocks[start:stop]) for start, stop in zip(edges, edges[1:], strict=False)]
        costs[0] += self.before
        costs[-1] += self.after
        return costs


def unit_costs(model: nn.Module, blocks: BlockList, *, seconds: Sequence[float] | None = None) -> UnitCosts:
    """Returns what the units of a model weigh.

    Args:
        model: the whole model.
        blocks: its list of blocks.
        seconds: measured times of what lies before, of each block, of what lies after, in place of counted
            operations.
    """
    sizes = [_parameters(model, blocks.before)]
    sizes += [_parameters(model, [name]) for name in blocks.names]
    sizes += [_parameters(model, blocks.after)]
    work = list(seconds if seconds is not None else blocks.flops or sizes)
    if not any(work):
        work = list(sizes)
    shares = [(size / (sum(sizes) or 1) + cost / (sum(work) or 1)) / 2 for size, cost in zip(sizes, work, strict=True)]
    return UnitCosts(before=shares[0], blocks=tuple(shares[1:-1]), after=shares[-1])


def _parameters(model: nn.Module, names: Sequence[str]) -> int:
    """Number of parameters below names; a tied copy counts, for each end of a pipeline holds one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    total = 0
    for name in names:
        held = modules[name].parameters() if name in modules else [model.get_parameter(name)]
        total += sum(parameter.numel() for parameter in held)
    return total


def balanced_cuts(costs: UnitCosts, num_stages: int) -> tuple[int, ...]:
    """Returns the cuts of least cost of the heaviest stage; among those, of the most even stages.

    Every stage holds a block where there are enough of them; otherwise what lies before, then what lies after, is a
    stage of its own.

    Example:
        >>> balanced_cuts(UnitCosts(before=1.0, blocks=(1.0,) * 6, after=1.0), 4)
        (1, 3, 5)
    """
    count = len(costs.blocks)
    alone_first = num_stages > count
    alone_last = num_stages > count + 1
    first, last = (0 if alone_first else 1), (count if alone_last else count - 1)
    heaviest = _least(costs, num_stages, first, last, None)
    return _least(costs, num_stages, first, last, heaviest[0])[1]


def _least(
    costs: UnitCosts, num_stages: int, first: int, last: int, limit: float | None
) -> tuple[float, tuple[int, ...]]:
    """Returns the best value and its cuts: the least maximum, or the least sum of squares below a limit."""
    count = len(costs.blocks)
    total = [0.0]
    for cost in costs.blocks:
        total.append(total[-1] + cost)

    def join(best: float, cost: float) -> float:
        if limit is None:
            return max(best, cost)
        return best + cost * cost if cost <= limit * (1 + 1e-9) else float("inf")

    if num_stages == 1:
        return costs.of_stages(())[0], ()
    # best[place] is the best of the stages so far, the last of which ends at `place`.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        place: (join(0.0, total[place] + costs.before), (place,)) for place in range(first, last + 1)
    }
    for _ in range(num_stages - 2):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in range(first, last + 1):
            options = [
                (join(value, total[stop] - total[start]), cuts) for start, (value, cuts) in best.items() if start < stop
            ]
            if options:
                value, cuts = min(options)
                following[stop] = (value, (*cuts, stop))
        best = following
    ends = [
        (join(value, total[count] - total[start] + costs.after), cuts)
        for start, (value, cuts) in best.items()
        if start < count or costs.after
    ]
    return min(ends)
