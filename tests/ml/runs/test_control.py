"""A run that is paused, saved, stopped and resumed is the run that was left alone; what changed it is repeated."""

import json
import random
import shutil
import signal

import pytest

from forgather.errors import ControlError
from forgather.interventions import read_interventions, repeating
from forgather.launch.control_client import send_request
from tests.matrix import thinned
from tests.ml.fixtures import assert_same_weights
from tests.ml.runs.controlled_runs import LAYOUTS, STEPS, ask, events, final_weights, losses, run
from tests.runs.hostile_requests import HOSTILE
from tests.runs.test_control_command import record

SEEDS = (0, 1)
CASES = [(layout, seed) for seed in SEEDS for layout in LAYOUTS]
QUICK = {("1F1B 2", 1)}


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
def test_pause_save_stop_and_resume_leave_the_bits_of_an_undisturbed_run(layout, seed, undisturbed, tmp_path):
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
    record_property("hostile_requests", len(refused))


CHANGES = {3: [ask("set", learning_rate=5e-4)], 5: [ask("set", logging_steps=2)], 8: [ask("set", learning_rate=2e-4)]}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: layout == "one"))
def test_changes_are_kept_by_a_resume_and_repeated_with_the_same_losses(layout, tmp_path):
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


def refused(answers):
    return [(answer.step, answer.error["code"]) if answer.error else answer.step for answer in answers]


def test_what_cannot_be_done_now_is_refused_and_changes_nothing(undisturbed, tmp_path):
    script = {
        2: [ask("resume"), ask("set", eval_steps=2)],
        STEPS: [ask("set", learning_rate=1e-3)],
    }
    answers, _ = run(tmp_path, "one", script)
    (first, _), (second, _), (last, _) = found = refused(answers)
    # The second request follows the first answer, and on a busy machine steps pass until it arrives.
    assert 2 <= first < second <= last == STEPS
    assert ["FG516"] * 3 == [code for _, code in found]
    assert "LambdaLR gives 0.0" in answers[-1].error["message"]
    assert losses(undisturbed("one")) == losses(tmp_path)
    assert not (tmp_path / "runs" / "run" / "interventions.jsonl").exists()


def test_settings_that_contradict_others_are_refused(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    answers, _ = run(tmp_path, "one", {2: [ask("set", eval_steps=3)]}, evaluates=True, **best)
    assert [(2, "FG516")] == refused(answers)


def test_a_request_after_the_last_step_is_told_that_the_run_has_ended(tmp_path):
    script = {STEPS: [ask("pause"), ask("stop")]}
    answers, is_stopped = run(tmp_path, "one", script)
    assert is_stopped
    assert [STEPS, STEPS] == refused(answers)


def test_a_save_is_made_without_a_save_strategy_and_its_failure_ends_nothing(undisturbed, tmp_path):
    answers, _ = run(tmp_path / "saves", "one", {3: [ask("save")], 5: [ask("save")]}, save_strategy="no")
    assert [3, 5] == refused(answers)
    assert ["checkpoint-3", "checkpoint-5", "runs"] == sorted(path.name for path in (tmp_path / "saves").iterdir())
    # A file where the folder of the checkpoint would be made.
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails" / "checkpoint-4").write_text("mine")
    answers, _ = run(tmp_path / "fails", "one", {4: [ask("save")], 5: [ask("save")]}, save_strategy="no")
    (failed, saved) = refused(answers)
    assert failed[1].startswith("FG6")
    assert 5 == saved
    for name in ("saves", "fails"):
        assert losses(undisturbed("one")) == losses(tmp_path / name)


def test_save_total_limit_counts_requested_checkpoints(tmp_path):
    run(tmp_path, "one", {3: [ask("save")], 7: [ask("save")]}, save_steps=5, save_total_limit=2)
    assert ["checkpoint-10", "checkpoint-12"] == sorted(path.name for path in tmp_path.glob("checkpoint-*"))


def test_a_pause_is_in_no_rate_and_in_no_time_of_the_run(tmp_path):
    script = {6: [ask("pause"), 1.0, ask("resume")]}
    run(tmp_path, "one", script, summary=True)
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    lines = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    pauses = [line["paused_seconds"] for line in lines if "paused_seconds" in line]
    assert len(pauses) == 1
    assert pauses[0] >= 1.0
    assert summary["final"]["train_runtime"] + pauses[0] < summary["whole_seconds"]
    assert summary["seconds"] + pauses[0] < summary["whole_seconds"]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", thinned(["one", "DDP 2", "1F1B 2"], lambda layout: layout == "one"))
def test_a_signal_ends_a_pause_and_saves(layout, undisturbed, tmp_path):
    _, is_stopped = run(tmp_path, layout, {5: [ask("pause"), signal.SIGTERM]})
    assert is_stopped
    assert [(5, "pause"), (5, "resume")] == events(tmp_path)
    run(tmp_path, layout, name="resumed", resume_from_checkpoint=True)
    assert losses(undisturbed(layout)) == losses(tmp_path, "resumed")


@pytest.mark.distributed
@pytest.mark.parametrize("layout", thinned(["DDP 2", "FSDP2 2", "1F1B 2", "ZeRO-2 2"], lambda layout: False))
def test_a_pause_longer_than_the_timeout_of_collectives_breaks_nothing(layout, undisturbed, tmp_path):
    run(tmp_path, layout, {5: [ask("pause"), 12.0, ask("resume")]}, timeout=6)
    assert losses(undisturbed(layout)) == losses(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", thinned(["DDP 2", "1F1B 2"], lambda layout: layout == "DDP 2"))
def test_a_request_is_one_broadcast_and_a_step_without_one_sends_nothing_more(layout, tmp_path):
    script = {5: [ask("set", learning_rate=5e-4)]}
    counts = [
        run(tmp_path / "asked", layout, script, counts=True)[0],
        run(tmp_path, layout, control="off", counts=True)[0],
    ]
    more = {name: counts[0][name] - count for name, count in counts[1].items() if counts[0][name] != count}
    assert {"broadcast_object_list": 1} == more
    assert {5} == {one.step for one in read_interventions(str(tmp_path / "asked" / "runs" / "run"))}


def test_a_rewound_run_keeps_what_was_set_since_the_checkpoint(tmp_path):
    given = {"bad_step_policy": "rewind", "save_steps": 4, "breaks": 7, "lr_scheduler_type": "constant"}
    run(tmp_path, "one", {6: [ask("set", learning_rate=5e-4)]}, **given)
    lines = [json.loads(line) for line in losses(tmp_path).splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if "loss" in line}
    # The rows of the bad step are passed over.
    later = [step for step in range(5, STEPS + 1) if step != 7]
    assert {**dict.fromkeys(range(1, 5), 1e-3), **dict.fromkeys(later, 5e-4)} == rates


def test_a_run_with_control_off_notes_no_address(tmp_path):
    run(tmp_path, "one", control="off")
    assert not (tmp_path / "runs" / "run" / "control.json").exists()
    with pytest.raises(ControlError, match="no run takes requests") as raised:
        record(tmp_path / "runs" / "run")
        send_request(str(tmp_path / "runs" / "run"), ask("pause"), timeout=1, waiting=print)
    assert "FG510" == raised.value.code


def test_a_resumed_run_keeps_the_events_up_to_its_checkpoint(tmp_path):
    script = {2: [ask("save")], 3: [ask("save")], 6: [ask("pause"), ask("resume")]}
    run(tmp_path, "one", script)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    run(tmp_path, "one", resume_from_checkpoint=True)
    assert [(2, "save"), (3, "save")] == events(tmp_path)
    steps = [line["step"] for line in map(json.loads, losses(tmp_path).splitlines())]
    assert [*range(1, STEPS + 1), STEPS] == steps


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"step": 3, "action": "pause"}',
        '{"step": -1, "action": "stop"}',
        '{"step": 3, "action": "set", "name": "seed", "value": 1}',
        '{"step": 3, "action": "set", "name": "learning_rate", "value": 1}',
        '{"step": 3, "action": "set", "name": "save_steps", "value": "many"}',
        '{"step": 3, "action": "stop", "more": 1}',
    ],
)
def test_damaged_interventions_are_refused_with_their_line(line, tmp_path):
    file = tmp_path / "interventions.jsonl"
    file.write_text('{"step": 2, "action": "stop"}\n' + line + "\n")
    with pytest.raises(ControlError, match="cannot be repeated") as raised:
        read_interventions(str(tmp_path))
    assert ("FG518", 2) == (raised.value.code, raised.value.span.line)


def test_an_intervention_that_was_not_written_to_its_end_was_not_made(tmp_path):
    (tmp_path / "interventions.jsonl").write_text('{"step": 2, "action": "stop"}\n{"step": 3, "act')
    assert [2] == [one.step for one in read_interventions(str(tmp_path))]
