"""A run that is paused, saved, stopped and resumed is the run that was left alone; what changed it is repeated."""

import random
import shutil

import pytest

from forgather.interventions import read_interventions, repeating
from tests.matrix import thinned
from tests.ml.fixtures import assert_same_weights
from tests.ml.runs.controlled_runs import LAYOUTS, STEPS, ask, events, final_weights, losses, run
from tests.runs.hostile_requests import HOSTILE

SEEDS = (0, 1)
CASES = [(layout, seed) for seed in SEEDS for layout in LAYOUTS]
QUICK = {("one", 0), ("FSDP2 2", 0), ("1F1B 2", 1)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns a function from a layout to the folder of its run that is left alone."""
    folders = {}

    def of(layout):
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp("alone")
            run(folders[layout], layout)
        return folders[layout]

    return of


def random_script(seed):
    """A pause, a save and a stop at three steps."""
    first, second, third = sorted(random.Random(seed).sample(range(1, STEPS), 3))
    return {first: [ask("pause"), ask("resume")], second: [ask("save")], third: [ask("stop")]}


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "seed"), thinned(CASES, lambda layout, seed: (layout, seed) in QUICK))
def test_pause_save_stop_and_resume_leave_the_bits_of_an_undisturbed_run(
    layout, seed, undisturbed, tmp_path, record_property
):
    script = random_script(list(LAYOUTS).index(layout) * 10 + seed)
    steps = list(script)
    answers, is_stopped = run(tmp_path, layout, script)
    assert is_stopped
    assert [None] * 4 == [answer.error for answer in answers]
    assert [steps[0], steps[0], steps[1], steps[2]] == [answer.step for answer in answers]
    assert (tmp_path / f"checkpoint-{steps[1]}").is_dir()
    acted = ["pause", "resume", "save", "stop"]
    assert list(zip([steps[0], *steps], acted, strict=True)) == events(tmp_path)
    run(tmp_path, layout, name="resumed", resume_from_checkpoint=True)
    alone = undisturbed(layout)
    assert losses(alone) == losses(tmp_path, "resumed")
    assert_same_weights(final_weights(alone), final_weights(tmp_path))
    record_property("control: runs with the bits of an undisturbed run", f"{layout}, {seed}")


def test_the_comparison_sees_a_changed_learning_rate(undisturbed, tmp_path):
    run(tmp_path, "one", {6: [ask("set", learning_rate=4e-4)]})
    assert losses(undisturbed("one")) != losses(tmp_path)


def test_hostile_requests_change_no_loss(undisturbed, tmp_path, record_property):
    script = {4: [ask("pause"), *HOSTILE.values(), ask("resume")], 9: [ask("save")]}
    answers, _ = run(tmp_path, "one", script)
    refused = answers[1 : 1 + len(HOSTILE)]
    assert all(answer is None or answer["error"] for answer in refused)
    assert losses(undisturbed("one")) == losses(tmp_path)
    assert_same_weights(final_weights(undisturbed("one")), final_weights(tmp_path))
    record_property("control: hostile requests refused, losses unchanged", len(refused))


CHANGES = {3: [ask("set", learning_rate=5e-4)], 5: [ask("set", logging_steps=2)], 8: [ask("set", learning_rate=2e-4)]}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: layout in ("one", "DDP 2")))
def test_changes_are_kept_by_a_resume_and_repeated_with_the_same_losses(layout, tmp_path, record_property):
    whole, broken, again = (tmp_path / name for name in ("whole", "broken", "again"))
    run(whole, layout, CHANGES)
    _, is_stopped = run(broken, layout, {**CHANGES, 6: [ask("stop")], 8: ()})
    assert is_stopped
    resumed_changes = {step: requests for step, requests in CHANGES.items() if step > 6}
    run(broken, layout, resumed_changes, name="resumed", resume_from_checkpoint=True)
    assert losses(whole) == losses(broken, "resumed")
    assert_same_weights(final_weights(whole), final_weights(broken))
    with repeating(str(whole / "runs" / "run")):
        run(again, layout)
    assert losses(whole) == losses(again)
    assert_same_weights(final_weights(whole), final_weights(again))
    made = [(one.step, one.name, one.value) for one in read_interventions(str(again / "runs" / "run"))]
    assert [(3, "learning_rate", 5e-4), (5, "logging_steps", 2), (8, "learning_rate", 2e-4)] == made
    record_property("control: changed runs that are repeated byte for byte", layout)


def test_a_repeated_run_stops_where_the_first_one_was_stopped(tmp_path):
    run(tmp_path / "first", "one", {4: [ask("stop")]})
    with repeating(str(tmp_path / "first" / "runs" / "run")):
        _, is_stopped = run(tmp_path / "again", "one")
    assert is_stopped
    assert losses(tmp_path / "first") == losses(tmp_path / "again")


def test_a_checkpoint_of_a_paused_step_is_written_again_with_what_is_set_meanwhile(tmp_path):
    script = {4: [ask("pause"), ask("set", learning_rate=5e-4), ask("resume")]}
    run(tmp_path, "one", script, save_steps=4)
    shutil.rmtree(tmp_path / "checkpoint-8")
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    before = losses(tmp_path)
    run(tmp_path, "one", name="resumed", resume_from_checkpoint=True)
    assert before == losses(tmp_path, "resumed")
