"""The simulated idle shares of torch's schedules equal the published formulas, for every schedule."""

from pathlib import Path

import pytest

from forgather.errors import TrainingError
from forgather.ml.strategy.pipeline.bubble_simulation import (
    StageTimes,
    actions_of,
    idle_formula,
    simulate,
)
from forgather.pipeline_schedules import SCHEDULES, schedules_with

SIZES = [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16), (8, 32)]
# Idle shares and micro-batches in flight for equal times: GPipe, 1F1B, Interleaved1F1B, LoopedBFS,
# InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.
KNOWN = {
    (2, 8): (0.111, 0.111, 0.059, 0.059, 0.020, 0.020, 0.020),
    (4, 8): (0.273, 0.273, 0.158, 0.158, 0.059, 0.059, 0.059),
    (4, 16): (0.158, 0.158, 0.086, 0.086, 0.030, 0.030, 0.030),
    (8, 32): (0.179, 0.179, 0.099, 0.099, 0.035, 0.035, 0.035),
}
ORDER = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
UNEQUAL = [StageTimes(1, 1.2, 0.8), StageTimes(1, 0.8, 1.2), StageTimes(1, 2, 1), StageTimes(0.5, 0.5, 0.5)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_idle_shares_are_those_of_theory(schedule, sizes):
    assert simulate(schedule, *sizes).idle_share == pytest.approx(idle_formula(schedule, *sizes), abs=0.002)


@pytest.mark.parametrize("times", UNEQUAL, ids=str)
@pytest.mark.parametrize("schedule", schedules_with("not v_shaped"))
def test_unequal_times_follow_theory_too(schedule, times):
    simulated = simulate(schedule, 4, 8, times=times).idle_share
    assert simulated == pytest.approx(idle_formula(schedule, 4, 8, times=times), abs=0.002)


@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"])
def test_more_stages_a_rank_shrink_the_idle_share(schedule):
    shares = [simulate(schedule, 4, 8, stages_per_rank=v).idle_share for v in (2, 3, 4)]
    assert shares == sorted(shares, reverse=True)
    for v, share in zip((2, 3, 4), shares, strict=True):
        assert share == pytest.approx(idle_formula(schedule, 4, 8, stages_per_rank=v), abs=0.002)


@pytest.mark.parametrize("sizes", KNOWN, ids=str)
def test_known_shares(sizes):
    assert KNOWN[sizes] == tuple(round(simulate(schedule, *sizes).idle_share, 3) for schedule in ORDER)


def test_v_schedules_with_unequal_times_are_simulated():
    times = StageTimes(1, 1.2, 0.8)
    assert 0.070 == round(simulate("ScheduleZBVZeroBubble", 4, 8, times=times).idle_share, 3)
    assert 0.080 == round(simulate("ScheduleInterleavedZeroBubble", 4, 8, times=times).idle_share, 3)
    for schedule in schedules_with("v_shaped"):
        with pytest.raises(ValueError, match="equal times only"):
            idle_formula(schedule, 4, 8, times=times)


def test_micro_batches_in_flight():
    def most(schedule, *sizes):
        return max(simulate(schedule, *sizes).in_flight)

    assert (8, 4, 5.5, 8, 4) == tuple(most(schedule, 4, 8) for schedule in (*ORDER[:4], ORDER[5]))
    assert (4, 11.5) == (most("Schedule1F1B", 4, 16), most("ScheduleInterleaved1F1B", 8, 32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_runs_once_and_none_before_what_it_needs(schedule):
    ranks, micro_batches = 4, 8
    done = simulate(schedule, ranks, micro_batches, send_time=0.1)
    stages = {event.stage for event in done.events}
    ends = {(event.stage, event.kind, event.micro_batch): event.end for event in done.events}
    assert len(ends) == len(done.events)
    for event in done.events:
        before = ends.get((event.stage - 1, "F", event.micro_batch), 0.0) if event.kind == "F" else 0.0
        assert event.start >= before
    for stage in stages:
        assert set(range(micro_batches)) == {m for s, kind, m in ends if (s, kind) == (stage, "F")}
        assert set(range(micro_batches)) == {m for s, kind, m in ends if s == stage and kind in "BI"}
        split = {m for s, kind, m in ends if (s, kind) == (stage, "I")}
        assert split == {m for s, kind, m in ends if (s, kind) == (stage, "W")}


def test_sending_and_slow_stages_cost_time():
    free = simulate("Schedule1F1B", 4, 8)
    assert simulate("Schedule1F1B", 4, 8, send_time=0.2).step_time > free.step_time
    slow = [StageTimes(), StageTimes(2, 2, 2), StageTimes(), StageTimes()]
    assert simulate("Schedule1F1B", 4, 8, times=slow).step_time > 1.5 * free.step_time
    with pytest.raises(ValueError, match="times are given for 2 stages, and there are 4"):
        simulate("Schedule1F1B", 4, 8, times=slow[:2])


def test_the_first_stage_has_no_backward_pass_to_its_inputs():
    assert StageTimes(1, 0, 5) == StageTimes(1, 2, 3).as_first()
    assert StageTimes(1, 2, 3).of("B") == StageTimes(1, 2, 3).as_first().of("B")


@pytest.mark.parametrize(
    ("schedule", "sizes", "words"),
    [
        ("Schedule1FB", (2, 4, 1), "did you mean 'Schedule1F1B'"),
        ("Schedule1F1B", (2, 4, 2), "cannot run 4 micro-batches on 2 ranks with 2 stages each"),
        ("ScheduleInterleaved1F1B", (4, 9, 2), "cannot run 9 micro-batches on 4 ranks"),
    ],
)
def test_sizes_that_torch_refuses_are_reported(schedule, sizes, words):
    with pytest.raises(TrainingError) as caught:
        actions_of(schedule, *sizes)
    assert "FG756" == caught.value.code
    assert words in str(caught.value)


def test_a_table_of_the_page_is_what_the_simulation_says():
    page = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    head, _, *rows = page[page.index("| p, m | GPipe") :].split("\n\n")[0].split("\n")
    names = [f"Schedule{name.strip()}" for name in head.strip("|").split("|")[1:]]
    for row in rows:
        sizes, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        ranks, micro_batches = map(int, sizes.split(","))
        for name, cell in zip(names, cells, strict=True):
            done = simulate(name, ranks, micro_batches)
            assert f"{done.idle_share:.3f} ({max(done.in_flight):g})" == cell, (name, sizes)
