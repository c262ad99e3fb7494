"""Plans of runs in which torch chooses what compiled blocks keep: bounds, between which the measured peak is."""

import functools

import pytest

from forgather.cli.plan_output import fit_lines, plan_lines
from forgather.launch.planning import Device, fit_on
from forgather.ml.planner.memory import plan_run
from forgather.planner.fit import Verdict, fit_plan
from forgather.planner.hardware import Hardware
from tests.ml.planner.cells import Cell, make_trainer, measured

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_regions": True}


def cell(**args):
    return Cell("budget", args=args, layers=6)


def plan(folder, **args):
    make = functools.partial(make_trainer, cell(**args), folder)
    return plan_run(make, world_size=1, local_world_size=1)[0]


def peak(found):
    return max(phase["num_bytes"] for phase in found["ranks"][0]["phases"])


def verdict(found, memory):
    (fit,) = fit_plan(found, Hardware(name="box", title="box", kind="cpu", memory_bytes=memory))
    return fit.verdict


def test_a_plan_is_between_all_recomputed_and_nothing(tmp_path):
    found = plan(tmp_path, **COMPILED, activation_memory_budget=0.5)
    kept, recomputed = plan(tmp_path), plan(tmp_path, gradient_checkpointing=True)
    assert (peak(kept), peak(recomputed)) == (peak(found), found["ranks"][0]["least_bytes"])
    assert peak(recomputed) < 0.5 * peak(kept)
    assert kept["ranks"][0]["least_bytes"] is recomputed["ranks"][0]["least_bytes"] is None
    verdicts = [Verdict.FITS, Verdict.MAY_FIT, Verdict.TOO_LARGE]
    limits = (peak(kept), (peak(kept) + peak(recomputed)) // 2, peak(recomputed) - 1)
    assert verdicts == [verdict(found, limit) for limit in limits]
    assert [Verdict.FITS, *[Verdict.TOO_LARGE] * 2] == [verdict(kept, limit) for limit in limits]
    text = "\n".join(plan_lines({**found, "host": (), "disk": ()}))
    assert "if blocks recompute all: activation_memory_budget lets torch choose what they keep" in text
    assert "activation_memory_budget 0.5: the plan is that of blocks that keep all activations" in text
    box = Device(Hardware(name="box", title="box", kind="cpu", memory_bytes=limits[1]))
    (line,) = [line for line in fit_lines(fit_on(found, box), 1) if "may fit" in line]
    assert "too much" in line


@pytest.mark.matrix
@pytest.mark.parametrize(("budget", "reach"), [(0.0, 0.03), (0.5, 0.0), (1.0, 0.0)])
def test_the_measured_peak_is_between_the_bounds(tmp_path, budget, reach):
    asked = {**COMPILED, "activation_memory_budget": budget}
    found = plan(tmp_path, **asked)
    (size,) = measured(cell(**asked), tmp_path)
    # A budget of 1 is torch's own division: nothing is chosen, but compiled code keeps fewer temporaries.
    least = found["ranks"][0]["least_bytes"] or peak(found) * 0.8
    assert least * (1 - reach) <= size <= peak(found)
    if budget == 0:
        assert size <= least * 1.05
