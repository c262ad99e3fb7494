"""The arithmetic of the largest batch, on functions of the number of rows."""

import random
from dataclasses import asdict

import pytest

from forgather.cli.plan_output import row_lines
from forgather.planner.batch_size import MOST_TRACES, largest_size


def search(peak_of, limit, most=1000):
    traced = []

    def measure(sizes):
        traced.extend(sizes)
        return [peak_of(size) for size in sizes]

    def predict(points, size):
        if len(points) == 1:
            return next(iter(points.values()))
        (low, below), (high, above) = sorted(points.items())
        return below + (above - below) * (size - low) // (high - low)

    found = largest_size(measure, predict, limit, most=most)
    assert tuple(traced) == found.traced
    return found


def test_memory_that_is_affine_takes_three_traces():
    numbers = random.Random(0)
    for _ in range(30):
        base, slope, limit = numbers.randint(0, 10**9), numbers.randint(1, 10**7), numbers.randint(10**9, 10**10)
        expected = min((limit - base) // slope, 1000)

        found = search(lambda size, base=base, slope=slope: base + size * slope, limit)

        assert (found.size, found.is_exact) == (expected, True)
        assert len(found.traced) <= 3
        assert found.next_bytes == (None if expected == 1000 else base + (expected + 1) * slope)


@pytest.mark.parametrize("bend", [3, 7, 40, 400])
def test_memory_with_a_bend_takes_a_few_traces_more(bend):
    def peak_of(size):
        return 1000 + 10 * size + 25 * max(0, size - bend)

    for limit in range(1100, 9000, 500):
        found = search(peak_of, limit)

        assert peak_of(found.size) <= limit
        assert len(found.traced) <= MOST_TRACES
        assert not found.is_exact or peak_of(found.size + 1) > limit
        assert found.is_exact or bend == 400


def test_an_answer_that_is_not_reached_still_fits():
    def peak_of(size):
        return 2**size

    found = search(peak_of, 2**100 + 1)

    assert peak_of(found.size) <= 2**100 + 1
    assert (len(found.traced), found.is_exact) == (MOST_TRACES, False)


@pytest.mark.parametrize(("limit", "size", "traced"), [(5, 0, (1, 2)), (10, 1, (1, 2)), (25, 2, (1, 2, 3))])
def test_limits_next_to_the_first_traces(limit, size, traced):
    found = search(lambda rows: 10 * rows, limit, most=3)

    assert (found.size, found.num_bytes, found.traced) == (size, 10 * max(size, 1), traced)


def test_a_limit_below_one_row_says_what_is_missing():
    found = search(lambda rows: 4000 * rows, 1000)
    (line,) = filter(None, row_lines({**asdict(found), "limit": 1000, "unit": 1, "pipeline_chunks": None}))
    assert "no batch fits into 1000 B: one row needs 3.9 KiB, 2.9 KiB too much" == line


def test_the_largest_allowed_size_is_an_answer():
    assert search(lambda rows: rows, 10**6, most=1).size == 1
    assert search(lambda rows: rows, 10**6, most=77).next_bytes is None
    with pytest.raises(ValueError, match="most is 0"):
        search(lambda rows: rows, 1, most=0)
