"""A checkpoint that lacks a part is refused by the name of the part, unless the run may do without it (R7)."""

import json
from pathlib import Path

import pytest

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.trainer.argument_checks import SettingError
from tests.cli.checkpoint_folders import forge
from tests.ml.fixtures import rows, tiny_llama

IN_STATE = ("schedule", "data", "rng", "meter")
PARTS = ("optimizer", *IN_STATE, "progress")
ALL = ",".join(PARTS)


@pytest.fixture
def saved(settings):
    args = settings(save_strategy="steps", save_steps=2, max_steps=2)
    Trainer(tiny_llama(), args, train_dataset=rows()).train()
    return Path(args.output_dir) / "checkpoint-2"


@pytest.fixture
def go_on(settings, saved):
    def train(allowed=None, **others):
        args = settings(max_steps=4, save_strategy="steps", allow_missing=allowed, **others)
        trainer = Trainer(tiny_llama(), args, train_dataset=rows())
        trainer.train(resume_from_checkpoint=others.get("resume_from_checkpoint", str(saved)))
        return trainer

    return train


def remove(folder, part):
    """Removes a part so that every digest fits: as one that was never written."""
    if part == "optimizer":
        for name in sorted(name.name for name in folder.iterdir() if name.name.startswith("optimizer")):
            forge(folder, name, None)
    elif part == "progress":
        forge(folder, "trainer_state.json", None)
    else:
        state = json.loads((folder / "training_state.json").read_text())
        del state[part]
        forge(folder, "training_state.json", json.dumps(state).encode())


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_missing_is_an_error_unless_it_is_named(saved, go_on, caplog, part):
    remove(saved, part)
    before = sorted(saved.parent.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"\[FG608\] the checkpoint .* has no {part} .*--allow-missing {part}\)"):
        go_on()
    with pytest.raises(CheckpointError, match=f"has no {part} "):
        go_on([other for other in PARTS if other != part])
    assert before == sorted(saved.parent.rglob("*"))
    trainer = go_on([part])
    assert 4 == trainer.state.global_step
    assert f"without {part}: " in caplog.text


def test_all_parts_that_are_missing_are_named_together(saved, go_on, caplog):
    for part in ("rng", "optimizer"):
        remove(saved, part)
    with pytest.raises(CheckpointError, match=r"has no optimizer and rng .*--allow-missing optimizer,rng\)"):
        go_on()
    assert 4 == go_on(["optimizer", "rng"]).state.global_step


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("optimizer.safetensors", ["optimizer"]),
        ("optimizer.json", ["optimizer"]),
        ("training_state.safetensors", list(IN_STATE)),
        ("training_state.json", list(IN_STATE)),
        ("trainer_state.json", ["progress"]),
    ],
)
def test_a_file_that_is_gone_is_named_with_the_parts_that_it_holds(saved, go_on, name, parts):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=rf"\[FG604\] .*{name}.*--allow-missing {','.join(parts)}\)"):
        go_on()
    assert 4 == go_on(parts).state.global_step


def test_what_may_be_missing_is_said_to_have_no_effect_where_there_is_no_checkpoint(go_on, saved, caplog):
    go_on(["rng"])
    assert "allow_missing" not in caplog.text
    go_on(["rng"], resume_from_checkpoint=False)
    assert "allow_missing has no effect: the run does not resume from a checkpoint" in caplog.text


def test_what_to_allow_is_told_with_what_is_allowed_already(saved, go_on):
    for part in ("optimizer", "rng", "data"):
        remove(saved, part)
    with pytest.raises(CheckpointError, match=r"has no data and rng .*--allow-missing optimizer,data,rng\)"):
        go_on(["optimizer"])
    (saved / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"\[FG604\] .*--allow-missing optimizer,progress\)"):
        go_on(["optimizer"])


def test_the_weights_can_never_be_missing(saved, go_on):
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"\[FG604\] .*model.safetensors"):
        go_on(list(PARTS))


def test_an_automatic_choice_passes_over_what_lacks_a_part_that_it_must_have(saved, go_on):
    (saved / "optimizer.json").unlink()
    with pytest.raises(CheckpointError, match="FG607"):
        go_on(resume_from_checkpoint="auto")
    assert 4 == go_on(["optimizer"], resume_from_checkpoint="auto").state.global_step


def test_a_model_alone_can_be_gone_on_from_where_that_is_asked_for(settings, go_on, caplog):
    args = settings(save_strategy="steps", save_steps=2, max_steps=2, save_only_model=True)
    Trainer(tiny_llama(), args, train_dataset=rows()).train()
    with pytest.raises(CheckpointError, match="FG608.*holds only the model: it has no optimizer, schedule, data, rng"):
        go_on()
    assert 4 == go_on(["optimizer", *IN_STATE]).state.global_step


def test_a_schedule_that_is_missing_goes_on_at_the_rate_of_its_step(saved, go_on):
    whole = go_on()
    assert whole.state.log_history[-1]["step"] == 4
    remove(saved, "schedule")
    without = go_on(["schedule"])
    assert whole.lr_scheduler.last_epoch == without.lr_scheduler.last_epoch
    assert whole.lr_scheduler.get_last_lr() == without.lr_scheduler.get_last_lr()


@pytest.mark.parametrize("wrong", [["optimiser"], "optimizer", [1]])
def test_a_part_that_does_not_exist_is_refused(settings, wrong):
    with pytest.raises(SettingError, match="FG813"):
        settings(allow_missing=wrong)


def test_every_part_was_removed(figure):
    figure(
        "R7", f"{len(PARTS)} parts and 5 files removed in turn: each is named, and skipped if --allow-missing names it"
    )
