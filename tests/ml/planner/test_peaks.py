"""The peaks of a timeline are those that a plain sum over what is alive gives, for any sizes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from forgather.ml.planner.allocations import HOST, Allocation, Region
from forgather.ml.planner.peaks import Timeline


def added_up(allocations):
    """Returns the largest sum of each region with its parts and its maker: an implementation that shares nothing."""
    events = sorted(
        (
            (time, sign, place)
            for place, one in enumerate(allocations)
            for time, sign in ((one.born, 1), (one.died, -1))
        ),
        key=lambda event: (event[0] is None, event[0]),
    )
    alive, best = {}, {}
    for time, sign, place in events:
        if time is None:
            continue
        one = allocations[place]
        if sign < 0:
            del alive[place]
            continue
        alive[place] = one
        for on_host, region in ((False, one.region), (True, Region(HOST, -1))):
            if on_host and not one.on_host:
                continue
            parts = Counter()
            for other in alive.values():
                if other.on_host == on_host:
                    parts[other.category] += other.num_bytes
            if region not in best or sum(parts.values()) > best[region][0]:
                best[region] = (sum(parts.values()), dict(+parts), str(one))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_peaks_are_those_of_a_plain_sum_for_all_sizes(seed):
    numbers = random.Random(seed)
    times = numbers.sample(range(1, 200), 120)
    allocations = [
        Allocation(
            numbers.choice((0, 1, 7, 2**40)),
            min(pair),
            Region(numbers.choice(("forward", "backward")), numbers.randrange(2)),
            "aten.mm",
            (place,),
            torch.float32,
            category=numbers.choice("abc"),
            died=numbers.choice((max(pair), None)),
            on_host=numbers.random() < 0.2 * (seed % 2),
        )
        for place, pair in enumerate(zip(times[::2], times[1::2], strict=True))
    ]
    timeline = Timeline(allocations, lambda one: one.category)
    for sizes in (timeline.sizes, timeline.sizes[::-1], timeline.sizes.astype(object) * 2**70):
        given = [replace(one, num_bytes=int(size)) for one, size in zip(allocations, sizes, strict=True)]
        found = timeline.peaks(sizes, given.__getitem__)
        assert added_up(given) == {at: (one.num_bytes, one.categories, one.made_by) for at, one in found.items()}
        for at, one in found.items():
            largest = max(one.course, key=lambda moment: moment.num_bytes)
            assert (one.num_bytes, one.categories) == (largest.num_bytes, largest.categories)
            assert len(one.course) == sum(item.on_host if at.phase == HOST else item.region == at for item in given)
