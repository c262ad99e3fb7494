"""The cuts of a pipeline: as good as the best of all possible ones, within the memory of every rank."""

import dataclasses
import itertools
import random

import pytest

from forgather.errors import PlanError
from forgather.planner.stage_cuts import StageMemory, UnitCosts, balanced_cuts

PLACEMENTS = {
    "one stage on each rank": (0, 1, 2),
    "four ranks": (0, 1, 2, 3),
    "two rounds": (0, 1, 0, 1),
    "v": (0, 1, 1, 0),
}


def case(generator, ranks):
    """A random model, speeds, and memory of which some ranks have too little for the fastest cuts."""

    def costs(low, high):
        blocks = tuple(float(generator.randint(low, high)) for _ in range(7))
        return UnitCosts(
            before=float(generator.randint(0, high)), blocks=blocks, after=float(generator.randint(0, high))
        )

    stages, devices = len(ranks), max(ranks) + 1
    memory = StageMemory(
        held=costs(1, 9),
        kept=costs(0, 4),
        in_flight=tuple(generator.randint(1, 4) for _ in range(stages)),
        extra=tuple(float(generator.randint(0, 5)) for _ in range(stages)),
        ranks=ranks,
        limits=tuple(float(generator.randint(20, 20 + 140 // devices)) for _ in range(devices)),
    )
    return costs(1, 20), tuple(float(generator.choice((1, 1, 2))) for _ in range(stages)), memory


def slowest(costs, speeds, cuts):
    return max(cost / speed for cost, speed in zip(costs.of_stages(cuts), speeds, strict=True))


def needs(memory, cuts):
    """The same as `StageMemory.of_ranks`, part by part."""
    edges = (0, *cuts, len(memory.held.blocks))
    found = [0.0] * len(memory.limits)
    for stage, rank in enumerate(memory.ranks):
        for source, times in ((memory.held, 1), (memory.kept, memory.in_flight[stage])):
            parts = [*source.blocks[edges[stage] : edges[stage + 1]]]
            parts += [source.before] if stage == 0 else []
            parts += [source.after] if stage == len(memory.ranks) - 1 else []
            found[rank] += times * sum(parts)
        found[rank] += memory.extra[stage]
    return found


def best_of_all(costs, speeds, memory):
    """The time of the slowest stage of the best cuts, among all cuts that fit; None if none do."""
    fitting = [
        slowest(costs, speeds, cuts)
        for cuts in itertools.combinations(range(1, len(costs.blocks)), len(speeds) - 1)
        if all(need <= limit for need, limit in zip(needs(memory, cuts), memory.limits, strict=True))
    ]
    return min(fitting, default=None)


@pytest.mark.parametrize("ranks", PLACEMENTS.values(), ids=PLACEMENTS)
def test_no_cuts_that_fit_are_faster(ranks):
    generator = random.Random(7)
    kinds = {"fastest fits": 0, "slower ones fit": 0, "none fits": 0}
    for _ in range(60):
        costs, speeds, memory = case(generator, ranks)
        best = best_of_all(costs, speeds, memory)
        free = balanced_cuts(costs, len(ranks), speeds=speeds)
        if best is None:
            with pytest.raises(PlanError) as caught:
                balanced_cuts(costs, len(ranks), speeds=speeds, memory=memory)
            assert "FG947" == caught.value.code
            kinds["none fits"] += 1
            continue
        cuts = balanced_cuts(costs, len(ranks), speeds=speeds, memory=memory)
        assert all(need <= limit for need, limit in zip(needs(memory, cuts), memory.limits, strict=True))
        assert best == slowest(costs, speeds, cuts)
        # Negative control: cuts that do not know of the memory would be faster where it matters, and would not fit.
        if slowest(costs, speeds, free) < best:
            assert not all(need <= limit for need, limit in zip(needs(memory, free), memory.limits, strict=True))
            kinds["slower ones fit"] += 1
        else:
            kinds["fastest fits"] += 1
    assert all(count > 4 for count in kinds.values()), kinds


def test_the_first_stage_keeps_more_micro_batches_and_gets_fewer_blocks():
    even = UnitCosts(before=0.0, blocks=(1.0,) * 12, after=0.0)
    memory = StageMemory(
        held=even,
        kept=even,
        in_flight=(4, 3, 2, 1),
        extra=(0.0,) * 4,
        ranks=(0, 1, 2, 3),
        limits=(12.0,) * 4,
    )
    assert (3, 6, 9) == balanced_cuts(even, 4)
    assert (2, 5, 8) == balanced_cuts(even, 4, memory=memory)


def test_the_message_names_the_rank_that_lacks_most():
    even = UnitCosts(before=0.0, blocks=(2.0**30,) * 4, after=2.0**31)
    nothing = UnitCosts(before=0.0, blocks=(0.0,) * 4, after=0.0)
    memory = StageMemory(
        held=even, kept=nothing, in_flight=(1, 1), extra=(0.0, 0.0), ranks=(0, 1), limits=(2.0**31, 2.0**31)
    )
    with pytest.raises(PlanError, match=r"the nearest need 3\.0 GiB on pipeline rank \d, which has 2\.0 GiB"):
        balanced_cuts(even, 2, memory=memory)
    assert (2,) == balanced_cuts(even, 2, memory=dataclasses.replace(memory, limits=(2.0**31, 2.0**32)))
