"""A traced step needs the memory that a real one needs, on every rank."""

import json
from pathlib import Path

import pytest
import torch

from forgather.ml.planner.allocations import HOST, Allocation, Region
from forgather.ml.planner.extrapolation import DEEPER, SHALLOW, extrapolated, extrapolated_work
from forgather.ml.planner.host_activations import ON_THE_WAY
from forgather.ml.planner.peaks import Moment, Peak
from tests.ml.planner.cells import FULL, ONE_ROW, QUICK, Cell, measured, traced
from tests.ml.planner.model_cells import CELLS

# What accelerate, DeepSpeed and published formulas estimate, from `make oracles`.
ESTIMATES = json.loads((Path(__file__).parents[1] / "recorded" / "memory_estimates.json").read_text())["cells"]


def planned(trace):
    """Returns the bytes of the device at the peak, without copies on their way, which there are none of on a CPU."""
    untraced = {**trace.facts.untraced, ON_THE_WAY: 0}
    return max(peak.num_bytes for at, peak in trace.peaks.items() if at.phase not in ("evaluation", HOST)) + sum(
        untraced.values()
    )


def named(cell):
    return f"{cell.group}-{cell}"


def parameter(cell):
    marks = [] if cell in QUICK else [pytest.mark.matrix]
    if cell.missed:
        marks.append(pytest.mark.xfail(reason=cell.missed, strict=True))
    return pytest.param(cell, marks=marks)


# T5 and ViT return views under FSDP2, which nothing changes in place, and DDP copies a gradient that is a slice.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
@pytest.mark.parametrize("cell", list(map(parameter, (*QUICK, *FULL, *CELLS))), ids=named)
def test_the_traced_peak_is_the_measured_one(cell, tmp_path, record_property):
    found = measured(cell, tmp_path)
    plans = [planned(trace) for trace in traced(cell, tmp_path)]
    pairs = list(zip(found, plans if len(plans) > 1 else plans * cell.world_size, strict=True))

    record_property("peaks", json.dumps(pairs))
    for real, plan in pairs:
        assert -cell.below <= plan / real - 1 <= cell.above, (real, plan)
    real, plan = max(pairs)
    others = ESTIMATES.get(str(cell), {})
    assert all(abs(plan - real) <= abs(other - real) for other in others.values()), (real, plan, others)


def test_a_plan_of_another_batch_misses_the_peak(tmp_path):
    real = measured(Cell("larger", args={"per_device_train_batch_size": 9}, layers=1), tmp_path)[0]
    plan = planned(traced(Cell("single", layers=1), tmp_path)[0])

    assert plan / real - 1 < -0.02


def test_offloaded_activations_count_for_the_host(tmp_path):
    kept, moved = (
        traced(Cell("one", args=args, device_type="cuda", layers=2, length=64), tmp_path)[0]
        for args in ({}, {"activation_offloading": True})
    )
    at = Region(HOST, -1)
    assert planned(moved) < 0.9 * planned(kept)
    assert at not in kept.peaks and set(moved.peaks[at].categories) == {"activations"}
    sent = {name: 0 for name in ("host.to_host", "host.to_device")}
    for message, count in moved.messages.items():
        sent[message.name] += count * message.num_bytes
    assert {*sent.values()} == {moved.peaks[at].num_bytes}
    assert 0 < moved.facts.untraced[ON_THE_WAY] < moved.peaks[at].num_bytes


@pytest.mark.matrix
def test_weights_that_a_gpu_updates_all_at_once_need_temporaries(tmp_path):
    gpu = {"device_type": "cuda"}
    at_once, one_by_one, fused = (
        Cell("update", args={**ONE_ROW, "optim": name}, layers=2, length=8, **given)
        for name, given in (("adamw_torch", gpu), ("adamw_torch", {}), ("adamw_torch_fused", gpu))
    )
    needed, less, least = (planned(traced(cell, tmp_path)[0]) for cell in (at_once, one_by_one, fused))

    (real,) = measured(at_once, tmp_path)
    assert -0.02 <= needed / real - 1 <= 0.03
    assert max(less, least) < 0.96 * needed


@pytest.mark.parametrize(
    "cell",
    [
        Cell("single", layers=6),
        pytest.param(Cell("FSDP2", 2, "AccelTrainer", {"fsdp": "full_shard"}, layers=9), marks=pytest.mark.matrix),
        pytest.param(Cell("DDP", 2, "AccelTrainer", layers=9), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_deep_model_is_on_the_line_through_two_shallow_ones(cell, tmp_path, record_property):
    (low,), (high,), (whole,) = (traced(cell, tmp_path, depth=depth) for depth in (SHALLOW, DEEPER, None))

    line = extrapolated(low.peaks, high.peaks, cell.layers)
    counts = extrapolated_work(low.operations, high.operations, cell.layers)

    assert (SHALLOW, cell.layers, cell.layers) == (low.num_blocks, low.whole, whole.num_blocks)
    assert {at: peak.num_bytes for at, peak in line.items()} == {at: whole.peaks[at].num_bytes for at in line}
    assert max(whole.peaks.values(), key=lambda peak: peak.num_bytes).num_bytes == max(
        peak.num_bytes for peak in line.values()
    )
    assert dict(whole.operations) == counts
    apart = max(abs(line[at].num_bytes / whole.peaks[at].num_bytes - 1) for at in line)
    record_property("figure: apart", f"{apart:.3%}")


def test_no_part_of_a_drawn_peak_is_below_zero():
    at = Region("backward", 0)
    low, high = (
        {at: Peak(14, {"gathered": 8, "sent": 2, "kept": 4})},
        {at: Peak(16, {"gathered": 2, "sent": 10, "kept": 4})},
    )
    found = extrapolated(low, high, 9)[at]
    assert (20, {"gathered": 0, "sent": 16, "kept": 4}) == (found.num_bytes, found.categories)


def test_a_peak_that_another_operator_makes_at_the_other_depth_is_drawn_by_its_own_line():
    at = Region("forward", 0)
    layers, logits = (Allocation(1, 1, at, name, (1,), torch.float32) for name in ("layers", "logits"))
    low_course = [Moment(layers, 14, {"kept": 12, "held": 2}), Moment(logits, 13, {"kept": 3, "logits": 8, "held": 2})]
    low = Peak(14, low_course[0].categories, str(layers), low_course)
    high = Peak(19, {"kept": 9, "logits": 8, "held": 2}, str(logits))
    found = extrapolated({at: low}, {at: high}, 20)[at]
    assert (64, {"kept": 54, "logits": 8, "held": 2}) == (found.num_bytes, found.categories)
