"""`split_spec: auto`: the cuts that are found fit, and none of those that fit are faster."""

import dataclasses
import functools

import pytest

from forgather.ml.planner.memory import traces_of_run
from forgather.ml.planner.split_search import search_split
from forgather.ml.planner.stage_costs import memory_of, micro_batches_in_flight, rank_bytes
from forgather.ml.strategy.pipeline.schedules import Placement
from forgather.planner.hardware import hardware
from tests.ml.planner.cells import make_trainer, measured, pipeline
from tests.ml.planner.test_rank_trace import planned

SIZES = {"world_size": 2, "local_world_size": 2}


def cuts_of(spec):
    """Returns the number of blocks up to each cut of a mapping."""
    return tuple(int(name.rpartition(".")[2]) + 1 for name in spec)


def cell_with(spec):
    """Returns a 1F1B pipeline of two ranks with three blocks."""
    return pipeline("1F1B", "Schedule1F1B", split_spec=spec or "auto", pipeline_chunks=2, layers=3)


SPECS = {place: {f"model.layers.{place - 1}": "end"} for place in (1, 2)}


@pytest.fixture(scope="module")
def make_with(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    return lambda spec: functools.partial(make_trainer, cell_with(spec), folder)


@pytest.fixture(scope="module")
def traced(make_with):
    """Traces both ranks under both cuts."""
    return {place: traces_of_run(make_with(spec), **SIZES)[0] for place, spec in SPECS.items()}


@pytest.mark.matrix
def test_the_traced_peaks_of_stages_are_the_measured_ones(traced, tmp_path):
    cell = cell_with(SPECS[2])
    for real, trace in zip(measured(cell, tmp_path), traced[2], strict=True):
        assert -cell.below <= planned(trace) / real - 1 <= cell.above


def test_memory_under_other_cuts_follows_from_one_trace(traced):
    memory = memory_of(traced[1], (0.0, 0.0))
    for place, traces in traced.items():
        assert pytest.approx([rank_bytes(trace) for trace in traces], rel=0.03) == memory.of_ranks((place,))
    # Negative control: with one micro-batch in flight in place of two, the first stage would need less.
    fewer = dataclasses.replace(memory, in_flight=(1, 1)).of_ranks((2,))
    assert fewer[0] < 0.95 * rank_bytes(traced[2][0])


@pytest.mark.matrix
def test_the_answer_fits_and_is_the_fastest_that_does(make_with, traced):
    peaks = {place: [rank_bytes(trace) for trace in traces] for place, traces in traced.items()}
    slow, fast = hardware("a100"), hardware("h100-sxm")
    # One byte less than the fastest cuts need on the first rank, which has the faster device.
    found = search_split(make_with, **SIZES, devices=[fast, slow], limits=[peaks[2][0] - 1, 10**12])
    assert (1,) == cuts_of(found["spec"])
    assert peaks[1] == found["peaks"]


def test_what_torch_keeps_in_flight():
    one, two = Placement(4, 1, v_shaped=False), Placement(2, 2, v_shaped=False)
    assert (4, 3, 2, 1) == micro_batches_in_flight("Schedule1F1B", one, 8)
    assert (8, 8, 8, 8) == micro_batches_in_flight("ScheduleGPipe", one, 8)
    most = micro_batches_in_flight("ScheduleInterleaved1F1B", two, 4)
    assert most[0] > most[-1] >= 1
