"""The cuts of a list of blocks into pipeline stages: the shortest slowest stage, within the memory of each rank.

Takes the costs of the parts of a model, and optionally the speed of each stage and the memory of each rank; gives the
cuts by dynamic programming. What is used before the blocks belongs to the first stage, what is used after them to the
last one. Sums are made in the same order in every process, so that all of them find the same cuts.

Units:
    costs are in any unit of time, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from forgather.errors import PlanError
from forgather.planner.memory_plan import format_size

MOST_PARTIAL_ANSWERS = 2000
"""How many partial answers are kept where ranks have several stages and too little memory for the fastest cuts."""


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """The costs of the parts of a model, as shares of the whole or in any other unit.

    Args:
        before: the cost of the modules before the blocks.
        blocks: the cost of each block.
        after: the cost of the modules after the blocks.
    """

    before: float
    blocks: tuple[float, ...]
    after: float

    @cached_property
    def _sums(self) -> list[float]:
        return list(accumulate(self.blocks, initial=0.0))

    def of_span(self, start: int, stop: int, *, is_first: bool, is_last: bool) -> float:
        """Returns the cost of a stage.

        Args:
            start: the index of its first block.
            stop: the index after its last block.
            is_first: whether it is the first stage.
            is_last: whether it is the last stage.
        """
        cost = self._sums[stop] - self._sums[start]
        return cost + (self.before if is_first else 0.0) + (self.after if is_last else 0.0)

    def of_stages(self, cuts: Sequence[int]) -> list[float]:
        """Returns the cost of each stage.

        Args:
            cuts: for each stage except the last, the number of blocks up to its end.
        """
        edges = (0, *cuts, len(self.blocks))
        last = len(cuts)
        return [
            self.of_span(start, stop, is_first=stage == 0, is_last=stage == last)
            for stage, (start, stop) in enumerate(zip(edges, edges[1:], strict=False))
        ]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory that stages need, and that ranks have.

    A stage needs what its parts hold, what its parts keep of each micro-batch in flight, and `extra`.

    Args:
        held: the bytes of the weights, gradients and optimizer state of each part.
        kept: the bytes of the activations that each part keeps of one micro-batch until its backward pass.
        in_flight: for each stage, the largest number of micro-batches whose activations it keeps at the same time.
        extra: for each stage, the bytes of everything else.
        ranks: for each stage, the number of its rank.
        limits: for each rank, the bytes that it has.
    """

    held: UnitCosts
    kept: UnitCosts
    in_flight: tuple[int, ...]
    extra: tuple[float, ...]
    ranks: tuple[int, ...]
    limits: tuple[float, ...]

    def of_stage(self, stage: int, start: int, stop: int) -> float:
        """Returns the bytes that a stage needs with the blocks from `start` to before `stop`."""
        ends = {"is_first": stage == 0, "is_last": stage == len(self.ranks) - 1}
        kept = self.in_flight[stage] * self.kept.of_span(start, stop, **ends)
        return self.held.of_span(start, stop, **ends) + kept + self.extra[stage]

    def of_ranks(self, cuts: Sequence[int]) -> list[float]:
        """Returns the bytes that each rank needs."""
        edges = (0, *cuts, len(self.held.blocks))
        needs = [0.0] * len(self.limits)
        for stage, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            needs[self.ranks[stage]] += self.of_stage(stage, start, stop)
        return needs

    def with_needs(self, cuts: Sequence[int], needs: Sequence[float]) -> StageMemory:
        """Returns the same with other `extra` bytes, so that the ranks need the given bytes under the given cuts."""
        missing = [need - known for need, known in zip(needs, self.of_ranks(cuts), strict=True)]
        extra = [own + missing[rank] / self.ranks.count(rank) for own, rank in zip(self.extra, self.ranks, strict=True)]
        return replace(self, extra=tuple(extra))

    def allows(self, cuts: Sequence[int]) -> bool:
        """Returns whether every rank has the memory that it needs."""
        return all(need <= limit for need, limit in zip(self.of_ranks(cuts), self.limits, strict=True))


def balanced_cuts(
    costs: UnitCosts, num_stages: int, *, speeds: Sequence[float] | None = None, memory: StageMemory | None = None
) -> tuple[int, ...]:
    """Returns the cuts with the shortest slowest stage, and among those, the cuts with the most even stages.

    Each stage has at least one block if there are enough blocks. Otherwise the modules before the blocks, and then also
    the modules after the blocks, become a stage of their own. With one stage on each rank, no other cuts are better.
    Nor are there with several, unless the fastest cuts lack memory and `MOST_PARTIAL_ANSWERS` are not enough.

    Args:
        costs: the costs of the parts of the model.
        num_stages: the number of stages.
        speeds: for each stage, the speed of its device; None if all are alike.
        memory: the memory of stages and ranks; None if there is enough.

    Raises:
        PlanError: FG947 if no cuts give every rank the memory that it needs.

    Example:
        >>> balanced_cuts(UnitCosts(before=1.0, blocks=(1.0,) * 6, after=1.0), 4)
        (1, 3, 5)
        >>> balanced_cuts(UnitCosts(before=0.0, blocks=(1.0,) * 6, after=0.0), 2, speeds=(2, 1))
        (4,)
    """
    search = _Search(costs, num_stages, tuple(speeds or (1.0,) * num_stages))
    fastest = search.best()
    assert fastest is not None, "there are more stages than parts"  # noqa: S101
    if memory is None or memory.allows(fastest):
        return fastest
    cuts = search.best(memory)
    if cuts is None:
        raise _no_room(search, memory)
    return cuts


class _Search:
    def __init__(self, costs: UnitCosts, num_stages: int, speeds: tuple[float, ...]) -> None:
        self._costs = costs
        self._num_stages = num_stages
        self._speeds = speeds

    def best(self, memory: StageMemory | None = None) -> tuple[int, ...] | None:
        """Returns the best cuts; None if there are none within the memory."""

        def seconds(stage: int, start: int, stop: int) -> float:
            ends = {"is_first": stage == 0, "is_last": stage == self._num_stages - 1}
            return self._costs.of_span(start, stop, **ends) / self._speeds[stage]

        slowest = self.run(seconds, max, memory)
        if slowest is None:
            return None
        # The tolerance is for rounding: the limit is a difference of sums, and the cuts that it comes from must pass.
        limit = slowest[0] * (1 + 1e-9)

        def square(stage: int, start: int, stop: int) -> float:
            cost = seconds(stage, start, stop)
            return cost * cost if cost <= limit else float("inf")

        # Many cuts have the same slowest stage: the second search chooses the most even of them.
        even = self.run(square, lambda one, other: one + other, memory)
        return (even or slowest)[1]

    def run(
        self,
        cost: Callable[[int, int, int], float],
        join: Callable[[float, float], float],
        memory: StageMemory | None = None,
    ) -> tuple[float, tuple[int, ...]] | None:
        """Returns the smallest value that `join` makes of the costs of all stages, and its cuts.

        A partial answer is known by the end of its last stage, and by the memory of the ranks that get further stages:
        of those that agree in both, only the best can become the best answer.
        """
        answers: dict[tuple[int, tuple[float, ...]], tuple[float, tuple[int, ...]]] = {(0, ()): (0.0, ())}
        for stage in range(self._num_stages):
            following: dict[tuple[int, tuple[float, ...]], tuple[float, tuple[int, ...]]] = {}
            for (start, loads), (value, cuts) in answers.items():
                for stop in self._stops(stage, start):
                    joined = join(value, cost(stage, start, stop))
                    held = () if memory is None else _with_stage(memory, loads, stage, start, stop)
                    if joined == float("inf") or held is None:
                        continue
                    answer = (joined, (*cuts, stop))
                    key = (stop, held)
                    if key not in following or answer < following[key]:
                        following[key] = answer
            if len(following) > MOST_PARTIAL_ANSWERS:
                kept = sorted(following.items(), key=lambda item: item[1])[:MOST_PARTIAL_ANSWERS]
                following = dict(kept)
            answers = following
        value, cuts = min(answers.values(), default=(float("inf"), ()))
        return (value, cuts[:-1]) if cuts else None

    def _stops(self, stage: int, start: int) -> Iterator[int]:
        count, last = len(self._costs.blocks), self._num_stages - 1
        if stage == last:
            # The last stage may have no block if it has modules after the blocks.
            if start < count or self._costs.after or last == 0:
                yield count
            return
        alone_first, alone_last = self._num_stages > count, self._num_stages > count + 1
        least = (0 if alone_first else 1) if stage == 0 else start + 1
        yield from range(least, (count if alone_last else count - 1) + 1)


def _with_stage(
    memory: StageMemory, loads: tuple[float, ...], stage: int, start: int, stop: int
) -> tuple[float, ...] | None:
    """Returns the bytes of the ranks that get further stages, by rank; None if the rank of a stage has too little."""
    rank = memory.ranks[stage]
    before = _unfinished(memory, stage)
    needs = dict(zip(before, loads, strict=True))
    needs[rank] = needs.get(rank, 0.0) + memory.of_stage(stage, start, stop)
    if needs[rank] > memory.limits[rank]:
        return None
    return tuple(needs[one] for one in _unfinished(memory, stage + 1))


def _unfinished(memory: StageMemory, stage: int) -> list[int]:
    """Returns the ranks that have a stage before the given one and another from it on."""
    return sorted(set(memory.ranks[:stage]) & set(memory.ranks[stage:]))


def _no_room(search: _Search, memory: StageMemory) -> PlanError:
    def share(stage: int, start: int, stop: int) -> float:
        return memory.of_stage(stage, start, stop) / max(memory.limits[memory.ranks[stage]], 1.0)

    found = search.run(share, max)
    needs = memory.of_ranks(found[1] if found else ())
    over = [need - limit for need, limit in zip(needs, memory.limits, strict=True)]
    rank = max(range(len(over)), key=lambda one: over[one])
    return no_room(over[rank], rank, memory.limits[rank], len(memory.ranks))


def no_room(over: float, rank: int, limit: float, num_stages: int) -> PlanError:
    """Returns the error about cuts of which none fit.

    Args:
        over: by how many bytes the nearest cuts are over the limit of a rank.
        rank: the number of this rank in the pipeline.
        limit: its limit in bytes.
        num_stages: the number of stages.
    """
    return PlanError(
        f"no cuts into {num_stages} stages fit into the memory: the nearest need {format_size(limit + over)} on "
        f"pipeline rank {rank}, which has {format_size(limit)}",
        code="FG947",
        hint="use more pipeline ranks, recompute activations (checkpoint_sequential: true), or take smaller or fewer "
        "micro-batches",
        found=over,
    )
