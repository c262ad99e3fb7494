"""When trials end early: ASHA against a simulation written apart, the median rule, and values that are not finite."""

import math
import random
from itertools import pairwise

import pytest

from forgather.sweeps.spec import EarlyTermination, Goal, Rule
from forgather.sweeps.stopping import best_value, ends_early

ASHA = EarlyTermination(rule=Rule.ASHA, min_steps=2, eta=3)
MEDIAN = EarlyTermination(rule=Rule.MEDIAN, min_steps=3)


def flat(value, steps=20):
    return [(step, value) for step in range(1, steps + 1)]


def test_the_best_third_goes_on_at_a_rung():
    curves = {number: flat(float(number), 2) for number in range(9)}
    going = [number for number in curves if ends_early(ASHA, Goal.MINIMIZE, curves, number) is None]
    assert [0, 1, 2] == going
    assert [6, 7, 8] == [n for n in curves if ends_early(ASHA, Goal.MAXIMIZE, curves, n) is None]


def test_a_trial_is_compared_with_those_at_its_rung_alone():
    # It is the worst at step 2, and the only one that has reached step 6.
    curves = {0: flat(5.0, 6), 1: flat(1.0, 5), 2: flat(2.0, 3)}
    assert ends_early(ASHA, Goal.MINIMIZE, curves, 0) is None
    assert "not among the best 1 of 3 trials at step 2" == ends_early(ASHA, Goal.MINIMIZE, curves, 2)


def test_nothing_ends_before_the_first_rung():
    curves = {0: flat(5.0, 1), 1: flat(1.0, 20)}
    assert ends_early(ASHA, Goal.MINIMIZE, curves, 0) is None
    assert ends_early(MEDIAN, Goal.MINIMIZE, curves, 0) is None


def test_a_value_that_is_not_finite_is_the_worst():
    curves = {0: flat(math.nan, 2), 1: flat(9.0, 2), 2: flat(8.0, 2)}
    assert ends_early(ASHA, Goal.MINIMIZE, curves, 0) is not None
    assert ends_early(ASHA, Goal.MINIMIZE, curves, 2) is None
    assert best_value(curves[0], Goal.MINIMIZE) is None


def test_the_median_rule_compares_the_best_value_with_running_averages():
    curves = {number: flat(float(number), 10) for number in range(4)} | {4: flat(1.9, 3), 5: flat(1.4, 3)}
    # The averages of the others at step 3 are 0, 1, 2, 3 and that of the other new trial.
    assert "worse than the median of 5 trials at step 3, 1.4" == ends_early(MEDIAN, Goal.MINIMIZE, curves, 4)
    assert ends_early(MEDIAN, Goal.MINIMIZE, curves, 5) is None
    few = {0: flat(0.0), 1: flat(1.0), 2: flat(9.0, 3)}
    assert ends_early(MEDIAN, Goal.MINIMIZE, few, 2) is None, "two others are too few"


def test_averages_of_the_largest_floats_are_averages():
    curves = {number: flat(1e308, 10) for number in range(3)} | {4: flat(1.7e308, 3)}
    assert "worse than the median" in ends_early(MEDIAN, Goal.MINIMIZE, curves, 4)


def simulated(losses, rungs, eta):
    """Runs trials one after the other, each until it ends; returns the trials that ended at which step.

    Written apart from the product: at each rung it sorts all values that any trial has had there.
    """
    reached = {rung: [] for rung in rungs}
    ends = {}
    for trial, curve in enumerate(losses):
        ends[trial] = len(curve)
        for rung in rungs:
            value = min(curve[:rung])
            reached[rung].append(value)
            better = sorted(reached[rung]).index(value)
            if better >= -(-len(reached[rung]) // eta):
                ends[trial] = rung
                break
    return ends


@pytest.mark.parametrize("seed", range(10))
def test_trials_one_after_the_other_end_as_in_a_simulation(seed):
    numbers = random.Random(seed)
    ends = [numbers.uniform(0.5, 2.0) for _ in range(12)]
    losses = [[end + 3 * math.exp(-step / 6) + numbers.gauss(0, 0.01) for step in range(1, 55)] for end in ends]
    expected = simulated(losses, rungs := [2, 6, 18, 54], 3)
    curves, found = {}, {}
    for trial, curve in enumerate(losses):
        curves[trial] = []
        for step, loss in enumerate(curve, start=1):
            curves[trial].append((step, loss))
            if step in rungs and ends_early(ASHA, Goal.MINIMIZE, curves, trial) is not None:
                break
        found[trial] = len(curves[trial])
    assert expected == found
    assert all(before < after for before, after in pairwise(rungs))
