"""Values that Optuna proposes: they lie in their distributions, follow the results, and do not depend on kills."""

import builtins

import pytest

from forgather.errors import ProjectError
from forgather.sweeps.search import proposed, refuse_missing_optuna
from forgather.sweeps.space import Bell, Choice, Interval, Parameter
from forgather.sweeps.spec import Goal, Method, SweepSpec

SPEC = SweepSpec(
    parameters=(
        Parameter("lr", Interval(1e-5, 1e-1, is_log=True)),
        Parameter("size", Interval(1, 8, is_whole=True)),
        Parameter("kind", Choice(("a", "b", None))),
    ),
    method=Method.OPTUNA,
    num_trials=30,
)


def loss(values):
    return abs(values["size"] - 6) + (values["kind"] != "b") + abs(values["lr"] - 1e-3) * 10


def searched(spec, number):
    found = []
    for trial in range(number):
        values = proposed(spec, trial, found)
        found.append((values, loss(values)))
    return found


def test_proposals_lie_in_their_distributions_and_get_better():
    found = searched(SPEC, 30)
    for values, _ in found:
        assert 1e-5 <= values["lr"] <= 1e-1
        assert isinstance(values["size"], int) and 1 <= values["size"] <= 8
        assert values["kind"] in ("a", "b", None)
    early, late = [one for _, one in found[:10]], [one for _, one in found[20:]]
    assert sum(late) < 0.75 * sum(early)


def test_a_proposal_depends_on_the_results_and_its_number_alone():
    found = searched(SPEC, 13)
    assert found[12][0] == proposed(SPEC, 12, found[:12])
    worse = [(values, -result) for values, result in found[:12]]
    assert found[12][0] != proposed(SPEC, 12, worse)


def test_trials_that_run_or_failed_count_as_bad_ones():
    found = searched(SPEC, 12)
    best = min(range(12), key=lambda at: found[at][1])
    pending = [(values, None if at == best else result) for at, (values, result) in enumerate(found)]
    assert proposed(SPEC, 12, pending)
    assert proposed(SPEC, 1, [(found[0][0], None)])
    assert proposed(SPEC, 1, [(found[0][0], float("nan"))])


def test_the_goal_is_respected():
    high = SweepSpec(parameters=SPEC.parameters, method=Method.OPTUNA, num_trials=30, goal=Goal.MAXIMIZE)
    found = []
    for trial in range(30):
        values = proposed(high, trial, found)
        found.append((values, -loss(values)))
    assert sum(one for _, one in found[20:]) > sum(one for _, one in found[:10])


def test_steps_are_counted_from_zero_as_by_every_other_method():
    steps = Interval(0.3, 1.7, 0.5)
    spec = SweepSpec(parameters=(Parameter("a", steps),), method=Method.OPTUNA, num_trials=9)
    # A value that another version proposed is no error.
    found = [({"a": 0.3}, 1.0)]
    for trial in range(1, 9):
        found.append((proposed(spec, trial, found), 1.0))
    assert {values["a"] for values, _ in found[1:]} <= set(steps.grid())


@pytest.mark.parametrize("one", [Interval(-1e300, 1e300), Interval(0, 2**32, is_whole=True), Interval(2.0, 2.0)])
def test_the_widest_distributions_have_proposals(one):
    spec = SweepSpec(parameters=(Parameter("a", one),), method=Method.OPTUNA, num_trials=15)
    found = []
    for trial in range(15):
        found.append((proposed(spec, trial, found), float(trial)))
    assert all(one.low <= values["a"] <= one.high for values, _ in found)


def test_a_distribution_that_optuna_does_not_have_is_refused():
    for one in (
        Interval(0, 2**60, is_whole=True),
        Bell(0, 1),
        Choice((1, 2), (0.1, 0.9)),
        Choice(([1], [2])),
        Interval(1, 2, 0.5, is_log=True),
    ):
        with pytest.raises(ProjectError, match="Optuna has no distribution for 'a'"):
            refuse_missing_optuna(SweepSpec(parameters=(Parameter("a", one),)))


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name == "optuna":
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr("forgather.sweeps.search.import_module", without)
    with pytest.raises(ProjectError, match=r"forgather\[sweep\]") as caught:
        refuse_missing_optuna(SPEC)
    assert "FG566" == caught.value.code
