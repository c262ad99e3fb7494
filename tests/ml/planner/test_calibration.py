"""Efficiencies that are fitted to measured steps: found again where runs tell them apart, and never guessed."""

import math

import pytest

from forgather.ml.planner.calibration import MeasuredStep, calibrate
from forgather.ml.planner.pipeline_step import schedule_seconds
from forgather.planner.efficiency import EFFICIENCIES, Efficiency, Range, assumed_of
from forgather.planner.hardware import Hardware
from forgather.planner.step_time import step_time
from forgather.planner.work import Message, Operation, RankWork, RunWork

DEVICE = Hardware(name="x", title="x", peak_flops={"fp32": 1e12}, memory_bytes_per_second=1e11, links={"nvlink": 1e10})
TRUE = Efficiency(
    **{
        name: Range(value, value)
        for name, value in {
            "compute": 0.2,
            "memory": 0.8,
            "communication": 0.1,
            "call_seconds": 4e-5,
            "message_seconds": 1e-5,
            "network_seconds": 1e-5,
        }.items()
    }
)


def work(*, products=0, additions=0, calls=0, messages=0):
    """A step of two ranks: products of 1 ms, additions of 1 ms, calls that take no time, and messages of 1 ms."""
    operations = {
        Operation("forward", "aten.mm", "float32", int(1e9), 1): products,
        Operation("forward", "aten.add", "float32", 0, int(1e8)): additions,
        Operation("forward", "aten.mul", "float32", 0, 1): calls,
    }
    sums = {Message("update", "c10d.allreduce_", int(1e7), 2): messages}
    one = RankWork(
        ranks=(0, 1),
        stages=(),
        operations={operation: count for operation, count in operations.items() if count},
        messages={message: count for message, count in sums.items() if count},
    )
    sizes = {"rows_per_update": 1, "tokens_per_row": 1, "num_updates": 1, "schedule": None, "micro_batches": 1}
    return RunWork(world_size=2, local_world_size=2, schedule_runs=1, ranks=(one,), **sizes)


def seconds(given, efficiency):
    return step_time(given, DEVICE, efficiency, simulate=schedule_seconds).seconds.middle


def measured(*works, slower=1.0):
    return [MeasuredStep(one, slower * seconds(one, TRUE)) for one in works]


MIXED = [
    work(products=40, additions=10, calls=2000),
    work(products=10, additions=40, calls=1000),
    work(products=5, additions=5, calls=9000),
    work(products=10, additions=10, calls=500, messages=20),
    work(products=60, additions=5, calls=100),
    work(products=5, additions=60, calls=100),
    work(products=20, additions=20, calls=3000, messages=5),
    work(products=30, additions=5, calls=6000, messages=30),
]


def test_runs_that_differ_give_the_true_efficiencies():
    found = calibrate(measured(*MIXED), DEVICE, Efficiency(call_seconds=Range(2e-6, 8e-6)))
    assert {"compute", "memory", "communication", "call_seconds"} >= set(found.fitted)
    assert len(found.fitted) == 3
    for name in ("compute", "memory", "communication", "call_seconds"):
        assert getattr(found.efficiency, name).low == pytest.approx(getattr(TRUE, name).low, rel=0.05)
    other = work(products=17, additions=23, calls=4000, messages=7)
    assert seconds(other, found.efficiency) == pytest.approx(seconds(other, TRUE), rel=0.05)


@pytest.mark.parametrize(
    "runs",
    [
        measured(MIXED[0]),
        measured(*MIXED[:3]),
        # However many runs: they are all alike.
        measured(*[work(products=number, additions=number, calls=50 * number) for number in (1, 2, 5, 10, 20, 40)]),
    ],
    ids=["one", "few", "alike"],
)
def test_what_runs_cannot_tell_apart_is_not_fitted(runs):
    found = calibrate(runs, DEVICE, Efficiency())
    assert () == found.fitted
    factors = set()
    for name in EFFICIENCIES:
        ratio = getattr(found.efficiency, name).low / getattr(Efficiency(), name).middle
        factors.add(round(math.log(ratio if name.endswith("_seconds") else 1 / ratio), 6))
    assert 1 == len(factors)


def test_one_run_is_planned_as_it_was_measured():
    (run,) = measured(MIXED[0], slower=3.0)
    found = calibrate([run], DEVICE, Efficiency())
    assert found.planned[0] == pytest.approx(run.seconds, rel=1e-4)
    assert seconds(run.work, found.efficiency) == pytest.approx(run.seconds, rel=1e-4)


def test_a_run_far_from_the_others_does_not_draw_them_away():
    disturbed = measured(*[work(products=number, additions=number) for number in (1, 2, 5, 10, 20, 40, 80)])
    disturbed[2] = disturbed[2]._replace(seconds=8 * disturbed[2].seconds)
    found = calibrate(disturbed, DEVICE, Efficiency())
    errors = sorted(abs(plan / run.seconds - 1) for plan, run in zip(found.planned, disturbed, strict=True))
    assert errors[-1] > 0.8
    # The mean of the logarithms would be off by a third.
    assert errors[-2] < 0.1
    assert () == found.fitted


def test_factors_are_above_zero():
    # No efficiency explains that more work takes less time.
    runs = [
        MeasuredStep(work(products=number, additions=60 - number), 1 / number) for number in (50, 40, 30, 20, 10, 5)
    ]
    found = calibrate(runs, DEVICE, Efficiency())
    assert all(getattr(found.efficiency, name).low > 0 for name in EFFICIENCIES)


def test_processors_have_other_assumptions():
    assert assumed_of("cpu").message_seconds.low > assumed_of("cuda").message_seconds.high
