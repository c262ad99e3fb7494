"""What was saved under one layout of processes goes on under any other: weights and optimizer."""

import shutil
import time

import pytest
import torch

from forgather.ml.checkpoint.save_plan import LocalState
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.distributed.states import read, write
from tests.reliability.layouts import LAYOUTS, largest_differences, leave, take_up

WITHIN = 1e-6


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    """An engine leaves its settings in the output folder of its arguments: not in that of the project."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Returns, for a layout, the folder of a training that was left in the middle and one that was not."""
    import_engine()
    folder, made = tmp_path_factory.mktemp("left"), {}

    def of(layout):
        if layout not in made:
            made[layout] = folder / layout.replace(" ", "-")
            run_ranks(LAYOUTS[layout][0], leave, layout, made[layout])
        return made[layout]

    return of


def pairs(full):
    """All pairs; or some in which each layout saves or loads once, and no kind follows its own."""
    names = list(LAYOUTS)
    if full:
        return [(first, then) for first in names for then in names]
    return [(first, names[(place + 6) % len(names)]) for place, first in enumerate(names[:7])]


def test_what_one_layout_saved_any_other_goes_on_with(left, tmp_path, full, figure):
    began, worst = time.perf_counter(), 0.0
    for number, (first, then) in enumerate(pairs(full)):
        folder = tmp_path / str(number)
        run_ranks(LAYOUTS[then][0], take_up, then, left(first) / "left", folder)
        taken = largest_differences(left(first) / "left", folder / "left")
        assert {0.0} == set(taken.values()), (first, then, taken)
        ends = largest_differences(left(first) / "end", folder / "end")
        assert all(value <= WITHIN for value in ends.values()), (first, then, ends)
        worst = max(worst, *ends.values())
        shutil.rmtree(folder)
    seconds = time.perf_counter() - began
    figure("layouts", f"{len(pairs(full))} pairs within {worst:.1e} after three steps, {seconds:.0f} s")


def _swapped(folder, into):
    """Writes a state again, in which one weight has its two moments in each other's place."""
    state = read(folder)
    entry = state["optimizer"]["state"]["model.layers.0.self_attn.q_proj.weight"]
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"].abs()
    write(LocalState(weights=state["model"], optimizer=state["optimizer"]), into)


def test_one_moment_in_the_place_of_another_is_found(left, tmp_path):
    torch.set_num_threads(1)
    run_ranks(1, _swapped, left("FSDP2 2") / "left", tmp_path / "wrong")
    run_ranks(2, take_up, "PP 2", tmp_path / "wrong", tmp_path / "taken")
    ends = largest_differences(left("FSDP2 2") / "end", tmp_path / "taken" / "end")
    assert ends["weights"] > 100 * WITHIN and ends["exp_avg"] > WITHIN
