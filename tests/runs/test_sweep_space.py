"""What a sweep tries: distributions, grids, the words of sweep files, and what is malformed."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgather.config.load import load_value
from forgather.errors import ProjectError
from forgather.planner.leaf import value_text
from forgather.project.literal import plain_value
from forgather.sweeps.space import Bell, Choice, Interval, Parameter, drawn, grid_of, read_distribution, read_parameters

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(0, 99) | st.text("abc_-: #", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(PLAIN)
def test_a_value_is_the_same_after_it_was_written(value):
    assert value == plain_value(load_value(value_text(value)), "value")


def test_numbers_that_json_does_not_have_are_written_as_yaml():
    assert math.isnan(plain_value(load_value(value_text(math.nan)), "value"))
    assert [math.inf, -math.inf] == plain_value(load_value(value_text([math.inf, -math.inf])), "value")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (3, Choice((3,))),
        ([1, "a"], Choice((1, "a"))),
        ({"value": None}, Choice((None,))),
        ({"values": [1, 2], "probabilities": [1, 3]}, Choice((1, 2), (1.0, 3.0))),
        ({"min": 1, "max": 5}, Interval(1, 5, is_whole=True)),
        ({"min": 1.0, "max": 5}, Interval(1.0, 5)),
        ({"min": 0, "max": 1, "q": 0.25, "distribution": "q_uniform"}, Interval(0, 1, 0.25)),
        (
            {"min": 0, "max": math.log(8), "distribution": "log_uniform"},
            Interval(1.0, math.exp(math.log(8)), is_log=True),
        ),
        ({"mu": 2, "sigma": 0.5, "distribution": "normal"}, Bell(2, 0.5)),
    ],
)
def test_words_of_sweep_files_describe_distributions(words, expected):
    assert expected == read_distribution(words, "sweep.parameters.a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no value to try"),
        ({"valeus": [1]}, "did you mean 'values'"),
        ({"min": 2, "max": 1}, "begins at 2 and ends at 1"),
        ({"min": 0, "max": 1, "distribution": "log_uniform_values"}, "has no logarithm"),
        ({"min": 0.5, "max": 2, "distribution": "int_uniform"}, "no whole numbers"),
        ({"min": "a", "max": 2.0}, "must be a number"),
        ({"min": True, "max": 2.0}, "must be a number"),
        ({"min": 0, "max": 1, "q": 0, "distribution": "q_uniform"}, "'q' of"),
        ({"values": [1, 2], "probabilities": [1]}, "how likely each of its 2"),
        ({"values": [1], "probabilities": [0]}, "how likely"),
        ({"sigma": -1, "distribution": "normal"}, "'sigma'"),
        ({"min": 0, "max": 9999, "distribution": "log_uniform"}, "exponents"),
        ({"distribution": "unifrom", "min": 0, "max": 1}, "did you mean 'uniform'"),
        ({"values": [1, 2], "probabilities": [math.inf, 1]}, "how likely"),
        ({"values": [1, 2], "probabilities": [10**400, 1]}, "how likely"),
        ({"min": 0.5, "max": 10**5000}, "'max' of 'sweep.parameters.a' is larger"),
        ({"min": math.nan, "max": 1.0}, "must be a number"),
        ({"min": 0.2, "max": 0.8, "q": 1, "distribution": "q_uniform"}, "no multiple of 1 is between"),
        ({"min": -9999, "max": 0, "distribution": "log_uniform"}, "exponents"),
        ({"min": -1e299, "max": 1e299, "q": 1e-299, "distribution": "q_uniform"}, "'q' of"),
        ({"mu": 699, "sigma": 1, "distribution": "log_normal"}, "exponents"),
        ({"sigma": 1, "q": 1e-300, "distribution": "q_normal"}, "'q' of"),
        ({"min": 0.0, "max": 1.0, "q": 0.1}, "the key 'q', which the distribution uniform does not have"),
        ({"values": [1, 2], "min": 0}, "the key 'min'"),
        ({"distribution": "constant"}, "has no 'value'"),
    ],
)
def test_what_is_no_distribution_is_refused_by_name(words, said):
    with pytest.raises(ProjectError) as caught:
        read_distribution(words, "sweep.parameters.a")
    assert "FG560" == caught.value.code
    assert said in str(caught.value)


@given(st.integers(0, 2**31), st.floats(1e-6, 1.0), st.floats(1.5, 1e3))
def test_what_is_drawn_lies_between_the_bounds(seed, low, ratio):
    high = low * ratio
    for one in (Interval(low, high), Interval(low, high, is_log=True)):
        assert low <= one.draw(random.Random(seed)) <= high
    whole = Interval(1, 9, is_whole=True).draw(random.Random(seed))
    assert isinstance(whole, int) and 1 <= whole <= 9
    for stepped in (Interval(0, 1, 0.1), Interval(0.3, 1.7, 0.5), Interval(0.3, 1.7, 0.5, is_log=True)):
        assert stepped.draw(random.Random(seed)) in stepped.grid()


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.3), (1.1, 1.2), (0.6, 0.7)])
def test_bounds_that_are_multiples_of_the_step_are_values(low, high):
    grid = list(Interval(low, high, 0.1).grid())
    assert (low, high) == (grid[0], grid[-1])


@given(st.dictionaries(st.sampled_from(["min", "max", "mu", "sigma", "q"]), st.floats() | st.integers()), st.data())
def test_each_distribution_that_is_read_can_be_drawn_from(numbers, data):
    kind = data.draw(st.sampled_from(["uniform", "int_uniform", "log_uniform", "log_uniform_values", "normal",
                                      "q_uniform", "q_log_uniform", "q_normal", "log_normal", "q_log_normal"]))  # fmt: skip
    try:
        found = read_distribution({"distribution": kind, **numbers}, "a")
    except ProjectError:
        return
    assert all(math.isfinite(found.draw(random.Random(seed))) for seed in range(5))


def test_a_logarithmic_interval_draws_each_decade_as_often():
    numbers = random.Random(0)
    drawn_numbers = [Interval(1e-4, 1.0, is_log=True).draw(numbers) for _ in range(4000)]
    shares = [sum(10**-at < one <= 10 ** (1 - at) for one in drawn_numbers) / 4000 for at in (1, 2, 3, 4)]
    assert all(abs(share - 0.25) < 0.03 for share in shares), shares
    # The negative control: without the logarithm, nine tenths are in the last decade.
    even = [Interval(1e-4, 1.0).draw(numbers) for _ in range(4000)]
    assert sum(0.1 < one for one in even) / 4000 > 0.85


def test_a_random_trial_depends_on_its_number_alone():
    parameters = [Parameter("a", Interval(0.0, 1.0)), Parameter("b", Choice((1, 2, 3)))]
    forward = [drawn(parameters, 7, number) for number in range(20)]
    backward = [drawn(parameters, 7, number) for number in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [drawn(parameters, 8, number) for number in range(20)]


def test_a_grid_has_every_combination_once():
    grid = grid_of(read_parameters({"a": [1, 2], "b": {"parameters": {"c": [3, 4, 5]}}}))
    assert [(a, c) for a in (1, 2) for c in (3, 4, 5)] == [(row["a"], row["b.c"]) for row in grid]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": {"min": 0.0, "max": 1.0}}, "infinitely many"),
        ({"a": list(range(400)), "b": list(range(400))}, "more than 100,000 combinations"),
        ({"a": {"min": 0, "max": 10**18}}, "more than 100,000 combinations"),
        ({"a": {"min": 0, "max": 1, "q": 1e-15, "distribution": "q_uniform"}}, "more than 100,000 combinations"),
    ],
)
def test_a_grid_that_never_ends_is_refused(found, said):
    with pytest.raises(ProjectError, match=said):
        grid_of(read_parameters(found))


@pytest.mark.parametrize("found", [{}, None, [1], {"a": [1], "b": {"parameters": None}}])
def test_a_sweep_without_parameters_is_refused(found):
    with pytest.raises(ProjectError, match="has no parameter"):
        read_parameters(found)


def test_a_group_of_parameters_has_no_values_of_its_own():
    with pytest.raises(ProjectError, match="the key 'values'"):
        read_parameters({"a": {"parameters": {"b": [2]}, "values": [1]}})


def test_one_value_has_one_parameter():
    with pytest.raises(ProjectError, match="'a.b' twice"):
        read_parameters({"a.b": [1], "a": {"parameters": {"b": [2]}}})
