"""A traced step needs the memory that a real one needs, on every rank."""

import json

import pytest

from forgather.ml.planner.extrapolation import DEEPER, SHALLOW, extrapolated, extrapolated_work
from tests.ml.planner.cells import ALL_AT_ONCE, FULL, ONE_ROW, QUICK, Cell, measured, traced
from tests.ml.planner.model_cells import CELLS


def planned(trace):
    return max(peak.num_bytes for at, peak in trace.peaks.items() if at.phase != "evaluation") + sum(
        trace.facts.untraced.values()
    )


def parameter(cell):
    marks = [] if cell in QUICK else [pytest.mark.matrix]
    if cell.missed:
        marks.append(pytest.mark.xfail(reason=cell.missed, strict=True))
    return pytest.param(cell, marks=marks)


@pytest.mark.parametrize("cell", list(map(parameter, (*QUICK, *FULL, *CELLS))), ids=str)
def test_the_traced_peak_is_the_measured_one(cell, tmp_path, record_property):
    found = measured(cell, tmp_path)
    plans = [planned(trace) for trace in traced(cell, tmp_path)]
    pairs = list(zip(found, plans if len(plans) > 1 else plans * cell.world_size, strict=True))

    record_property("peaks", json.dumps(pairs))
    for real, plan in pairs:
        assert -cell.below <= plan / real - 1 <= cell.above, (real, plan)


def test_a_plan_of_another_batch_misses_the_peak(tmp_path):
    real = measured(Cell("larger", args={"per_device_train_batch_size": 9}), tmp_path)[0]
    plan = planned(traced(Cell("single"), tmp_path)[0])

    assert plan / real - 1 < -0.02


def test_weights_that_a_gpu_updates_all_at_once_need_temporaries(tmp_path):
    at_once, one_by_one = Cell("at once", args=ONE_ROW, **ALL_AT_ONCE), Cell("one by one", args=ONE_ROW, layers=8)
    fused = Cell("fused", args={**ONE_ROW, "optim": "adamw_torch_fused"}, **ALL_AT_ONCE)
    needed, less, least = (planned(traced(cell, tmp_path)[0]) for cell in (at_once, one_by_one, fused))

    (real,) = measured(at_once, tmp_path)
    assert -0.02 <= needed / real - 1 <= 0.03
    assert max(less, least) < 0.96 * needed


@pytest.mark.parametrize(
    "cell",
    [
        Cell("single", layers=9),
        pytest.param(Cell("FSDP2", 2, "AccelTrainer", {"fsdp": "full_shard"}, layers=9), marks=pytest.mark.matrix),
        pytest.param(Cell("DDP", 2, "AccelTrainer", layers=9), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_deep_model_is_on_the_line_through_two_shallow_ones(cell, tmp_path):
    (low,), (high,), (whole,) = (traced(cell, tmp_path, depth=depth) for depth in (SHALLOW, DEEPER, None))

    line = extrapolated(low.peaks, high.peaks, cell.layers)
    counts = extrapolated_work(low.operations, high.operations, cell.layers)

    assert (SHALLOW, cell.layers, cell.layers) == (low.num_blocks, low.whole, whole.num_blocks)
    assert {at: peak.num_bytes for at, peak in line.items()} == {at: whole.peaks[at].num_bytes for at in line}
    assert max(whole.peaks.values(), key=lambda peak: peak.num_bytes).num_bytes == max(
        peak.num_bytes for peak in line.values()
    )
    assert dict(whole.operations) == counts
