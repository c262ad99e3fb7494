"""Numbers by position do not depend on what is drawn with them, and have the distributions that they should have."""

import math
import statistics

import numpy as np
import pytest

from forgather.ml.strategy.counter_draws import (
    CHUNK,
    logarithm,
    normal_probability,
    normal_quantile,
    stream_key,
    uniform,
)

COUNT = 40_000


def drawn(start, length, *, seed=1, name="a.weight", number=0):
    return uniform(stream_key(seed, name, number), [(start, length)], length)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (1, 5), (3, 2), (4, 4), (CHUNK - 1, 2), (17, 300)])
def test_an_element_does_not_depend_on_what_is_drawn_with_it(start, length):
    every = drawn(0, CHUNK + 400)
    assert (drawn(start, length) == every[start : start + length]).all()


def test_ranges_are_joined_in_their_order():
    key = stream_key(1, "a.weight", 0)
    every = uniform(key, [(0, 100)], 100)
    assert (uniform(key, [(50, 7), (3, 5)], 12) == np.concatenate([every[50:57], every[3:8]])).all()


def test_normal_numbers_do_not_depend_on_the_length_of_the_array():
    # A vectorized function treats the end of an array in another way than its middle.
    every = normal_quantile(drawn(0, 4099))
    for start, length in ((0, 1), (1, 2), (5, 17), (100, 3999)):
        assert (normal_quantile(drawn(start, length)) == every[start : start + length]).all()


def test_the_values_are_those_of_this_version():
    # A change of these needs another COUNTER_VERSION.
    assert drawn(5, 2).tolist() == PINNED_UNIFORM
    assert normal_quantile(drawn(5, 2)).tolist() == PINNED_NORMAL


PINNED_UNIFORM = [0.41863760409111117, 0.23892739667274443]
PINNED_NORMAL = [-0.20538004700429408, -0.7097570727658609]


def test_quantiles_are_those_of_the_normal_distribution():
    tails = 10.0 ** -np.linspace(0.31, 15, 400)
    for probability in (*tails, 0.5, *(1 - tails[:200])):
        found = float(normal_quantile(np.array([probability]))[0])
        assert normal_probability(found) == pytest.approx(probability, rel=2e-13)
        assert found == pytest.approx(statistics.NormalDist().inv_cdf(probability), rel=1e-13, abs=1e-15)


def test_logarithms_are_those_of_the_library_to_the_last_bits():
    numbers = np.concatenate([10.0 ** -np.linspace(0, 16, 999), np.linspace(0.4, 2.5, 999)])
    found = logarithm(numbers)
    assert max(abs(one - math.log(x)) for one, x in zip(found, numbers, strict=True)) < 1e-14


def distance(values, probability):
    """The statistic of Kolmogorov and Smirnov: the largest distance from the distribution."""
    order = np.sort(values)
    expected = np.array([probability(x) for x in order])
    steps = np.arange(len(order)) / len(order)
    return max(np.abs(expected - steps).max(), np.abs(expected - steps - 1 / len(order)).max())


LIMIT = 1.95 / math.sqrt(COUNT)
"""The statistic of 1 in 1,000 samples is larger."""


def test_numbers_are_uniform_and_normal():
    numbers = drawn(0, COUNT)
    assert 0 < numbers.min() < numbers.max() < 1
    assert distance(numbers, lambda x: x) < LIMIT
    found = normal_quantile(numbers)
    assert distance(found, normal_probability) < LIMIT
    assert distance(found * 1.05, normal_probability) > LIMIT


@pytest.mark.parametrize("other", [{"seed": 2}, {"name": "b.weight"}, {"number": 1}])
def test_streams_of_other_keys_are_independent(other):
    one, two = drawn(0, COUNT), drawn(0, COUNT, **other)
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(COUNT)
    # Neighbors in one stream as well.
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 4 / math.sqrt(COUNT)
