"""Planned against measured steps of two gloo ranks, as recorded by scripts/bench/plan_times.py.

The times are recorded; what is tested is the arithmetic from counted work to seconds, and the calibration.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from forgather.launch.time_planning import time_of
from forgather.ml.planner.calibration import MeasuredStep, calibrate
from forgather.planner.efficiency import ON_PROCESSORS
from forgather.planner.hardware import hardware
from tests.planner.step_figures import Figures

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "step_times.json").read_text())
FIGURES = Figures(RECORDED["texts"])
STEPS = {step["name"]: (MeasuredStep(FIGURES.work(step), step["seconds"]), step) for step in RECORDED["steps"]}
CALIBRATING = [run for run, step in STEPS.values() if step["calibrates"]]
PLANNED = [run for run, step in STEPS.values() if not step["calibrates"]]


def kendall(values):
    """Returns Kendall's tau of some values and the measured seconds of the planned runs."""
    pairs = list(itertools.combinations(zip(values, PLANNED, strict=True), 2))
    agree = sum((first - second) * (one.seconds - other.seconds) > 0 for (first, one), (second, other) in pairs)
    return 2 * agree / len(pairs) - 1


def planned(device, runs=PLANNED):
    steps = [time_of(run.work, device)["step"]["seconds"] for run in runs]
    return [(step["low"] + step["high"]) / 2 for step in steps]


@pytest.fixture
def device(tmp_path):
    file = tmp_path / "calibrated.json"
    file.write_text(json.dumps(RECORDED["device"]))
    return hardware(str(file))


def test_the_order_of_steps_after_a_calibration_by_several_runs(device, record_property):
    assert len(PLANNED) >= 8
    found = planned(device)
    record_property("figure: Kendall's tau", f"{kendall(found):.2f}")
    assert kendall(found) >= 0.8
    errors = [abs(seconds / run.seconds - 1) for seconds, run in zip(found, PLANNED, strict=True)]
    assert median(errors) < 0.25
    # Neither FLOPs nor rows alone give the order.
    assert kendall([run.work.executed_flops for run in PLANNED]) < kendall(found)
    assert kendall([run.work.rows_per_update for run in PLANNED]) < 0.8


@pytest.mark.parametrize("number", range(len(CALIBRATING)))
def test_the_order_of_steps_after_a_calibration_by_one_run(device, number, record_property):
    run = CALIBRATING[number]
    one = calibrate([run], device, ON_PROCESSORS)
    assert () == one.fitted
    assert one.planned[0] == pytest.approx(run.seconds, rel=1e-3)
    # One factor for all work stretches the times, and leaves their order.
    tau = kendall(planned(replace(device, efficiency=one.efficiency)))
    record_property("figure: Kendall's tau", f"{tau:.2f}")
    assert tau >= 0.8


@pytest.mark.matrix
def test_the_recorded_efficiencies_are_those_of_the_fit(device):
    found = calibrate(CALIBRATING, device, ON_PROCESSORS)
    assert list(found.fitted) == RECORDED["device"]["efficiency"]["fitted"]
    for name in ("compute", "memory", "communication", "call_seconds", "message_seconds"):
        assert getattr(found.efficiency, name).low == pytest.approx(getattr(device.efficiency, name).low, rel=0.02)


def test_the_page_has_the_recorded_figures(device):
    page = (Path(__file__).parents[3] / "docs" / "calibration.md").read_text(encoding="utf-8")
    runs = [run for run, _ in STEPS.values()]
    lines = ["| config | measured | planned | |", "|---|---|---|---|"]
    for name, run, seconds in zip(STEPS, runs, planned(device, runs), strict=True):
        calibrates = " calibrates" if STEPS[name][1]["calibrates"] else ""
        lines.append(f"| {name} | {run.seconds:.3f} | {seconds:.3f} | {seconds / run.seconds - 1:+.0%}{calibrates} |")
    lines += ["", f"Kendall's tau of the planned twelve is {kendall(planned(device)):.2f}."]
    assert "\n".join(lines) in page
