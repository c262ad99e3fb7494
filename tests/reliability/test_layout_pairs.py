"""What was saved under one layout of processes goes on under any other: weights and optimizer."""

import itertools
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


QUICK = [
    ("single", "ZeRO-3"),
    ("FSDP2 2", "PP 2"),
    ("TP 2", "DDP 2"),
    ("FSDP2 x CP 2x2", "CP ring 2"),
    ("HSDP 2x2", "ZeRO-1"),
]


def test_the_quick_pairs_hold_every_strategy():
    strategies = {name.split()[0].split("-")[0] for name in LAYOUTS if " x " not in name}
    assert strategies == {name.split()[0].split("-")[0] for pair in QUICK for name in pair}


def test_what_one_layout_saved_any_other_goes_on_with(left, tmp_path, full, figure):
    began, worst, wrong = time.perf_counter(), 0.0, []
    pairs = list(itertools.product(LAYOUTS, repeat=2)) if full else QUICK
    for number, (first, then) in enumerate(pairs):
        folder = tmp_path / str(number)
        run_ranks(LAYOUTS[then][0], take_up, then, left(first) / "left", folder)
        taken = largest_differences(left(first) / "left", folder / "left")
        ends = largest_differences(left(first) / "end", folder / "end")
        if {0.0} != set(taken.values()) or max(ends.values()) > WITHIN:
            wrong.append((first, then, taken, ends))
        worst = max(worst, *ends.values())
        shutil.rmtree(folder)
    assert [] == wrong
    seconds = time.perf_counter() - began
    figure("layouts", f"{len(pairs)} pairs within {worst:.1e} after three steps, {seconds:.0f} s")


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
