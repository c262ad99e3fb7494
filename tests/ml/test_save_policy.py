"""When a run saves, and which of its checkpoints stay."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.checkpoint import LocalStorage, Retention, list_checkpoints, prune, write_checkpoint
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.save_clock import SaveClock
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import Regression, regression_rows


class Says(TrainerCallback):
    """Notes the steps that were saved, and may end the run."""

    def __init__(self, losses=(), stop_at=None):
        self.losses = list(losses)
        self.saved = []
        self.stop_at = stop_at

    def on_save(self, args, state, control, **others):
        self.saved.append(state.global_step)

    def on_step_end(self, args, state, control, **others):
        if state.global_step == self.stop_at:
            control.should_training_stop = True


def trained(settings, callback, **given):
    """Returns the steps of the checkpoints that lie there after a run of eight steps in two epochs."""
    args = settings(num_train_epochs=2, **given)
    evaluates = {"eval_dataset": regression_rows(2)} if args.eval_strategy != "no" else {}
    trainer = Trainer(Told(callback.losses), args, train_dataset=regression_rows(), callbacks=[callback], **evaluates)
    trainer.train()
    return [step for step, _ in list_checkpoints(Path(args.output_dir))]


class Told(Regression):
    """A model whose evaluations have the losses that it is told."""

    def __init__(self, losses):
        super().__init__()
        self.losses = iter(losses)

    def forward(self, x, y):
        return super().forward(x, y) if self.training else torch.tensor(next(self.losses))


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "steps", "save_steps": 3}, [3, 6, 8]),
        ({"save_strategy": "epoch"}, [4, 8]),
        ({"save_strategy": "epoch", "max_steps": 6}, [4, 6]),
        ({"save_strategy": "steps", "save_steps": 100, "save_minutes": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"save_strategy": "steps", "save_steps": 4, "save_minutes": 60}, [4, 8]),
        ({"save_strategy": "no", "save_minutes": 1e-9}, []),
    ],
)
def test_a_run_saves_by_steps_epochs_and_minutes_and_at_its_end(settings, given, saved):
    callback = Says()
    assert saved == trained(settings, callback, **given)
    assert saved == callback.saved


def test_a_run_that_a_callback_ends_saves_its_end(settings):
    assert [3, 5] == trained(settings, Says(stop_at=5), save_strategy="steps", save_steps=3)


LOSSES = [5.0, 3.0, 4.0, 2.0, 6.0, 2.5, 2.0, 9.0]
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


@pytest.mark.parametrize(
    ("given", "saved", "kept"),
    [
        ({"save_strategy": "best"}, [1, 2, 4, 8], [1, 2, 4, 8]),
        ({"save_strategy": "best", "save_top_k": 2}, [1, 2, 3, 4, 6, 7, 8], [4, 7, 8]),
        ({"save_strategy": "steps", "save_steps": 3, "save_on_best": True}, [1, 2, 3, 4, 6, 8], [1, 2, 3, 4, 6, 8]),
        ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, range(1, 9), [4, 8]),
        ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}, range(1, 9), [4, 7, 8]),
        ({"save_strategy": "steps", "save_steps": 1, "save_top_k": 3}, range(1, 9), [4, 6, 7, 8]),
        (
            {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "keep_every_n_steps": 3},
            range(1, 9),
            [3, 4, 6, 8],
        ),
    ],
)
def test_the_best_the_newest_and_every_so_many_stay(settings, given, saved, kept):
    callback = Says(LOSSES)
    assert kept == trained(settings, callback, **EVERY_STEP, **given)
    assert list(saved) == callback.saved


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ({"save_minutes": 0}, "FG814", "save_minutes is 0"),
        ({"save_minutes": float("inf")}, "FG813", "save_minutes is inf"),
        ({"save_minutes": "often"}, "FG813", "save_minutes is 'often'"),
        ({"save_on_best": True}, "FG814", "save_on_best needs evaluations"),
        ({"save_top_k": 2}, "FG814", "save_top_k 2 needs evaluations"),
        ({"save_top_k": 0}, "FG813", "save_top_k is 0"),
        ({"keep_every_n_steps": 0}, "FG813", "keep_every_n_steps is 0"),
        ({"save_interval": 0}, "FG813", "save_steps is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, given, code, message):
    with pytest.raises(SettingError) as refused:
        settings(**given)
    assert code == refused.value.code
    assert message in refused.value.message


def test_the_words_of_other_libraries_are_translated(settings):
    args = settings(save_strategy="steps", save_interval=3, keep_checkpoints=4)
    assert (3, 4) == (args.save_steps, args.save_total_limit)
    assert 5 == settings(keep_interval=5).save_total_limit


def test_nothing_is_removed_where_no_checkpoint_that_stays_is_intact(tmp_path, caplog):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, lambda draft: draft.write("a", [b"aaaa"]))
    (tmp_path / "checkpoint-3" / "a").write_bytes(b"aaab")
    assert [] == prune(tmp_path, Retention(1))
    assert "none of those that would remain is intact" in caplog.text
    assert [tmp_path / "checkpoint-1"] == prune(tmp_path, Retention(2))


class Forgetful(LocalStorage):
    """Loses the end of a file without a word."""

    def create(self, file):
        stream = super().create(file)
        write = stream.write
        stream.write = lambda data: write(memoryview(data)[: 3 if file.name == "a" else None])
        return stream


def test_a_checkpoint_that_the_storage_lost_a_part_of_gets_no_name(tmp_path):
    write_checkpoint(tmp_path, 1, lambda draft: draft.write("a", [b"aaaa"]))
    with pytest.raises(CheckpointError, match="it has 3 bytes and 4 were written") as refused:
        write_checkpoint(tmp_path, 1, lambda draft: draft.write("a", [b"bbbb"]), storage=Forgetful())
    assert "FG603" == refused.value.code
    assert ["checkpoint-1"] == [entry.name for entry in tmp_path.iterdir()]
    assert 4 == read_manifest(tmp_path / "checkpoint-1").size


def test_the_clock_tells_when_the_minutes_have_passed():
    seconds = [0.0]
    clock = SaveClock(1, now=lambda: seconds[0])
    clock.restart(10)
    due = []
    for step in range(11, 40):
        seconds[0] += 7
        if clock.is_due(step):
            due.append(step)
            clock.restart(step)
    assert [19, 28, 37] == due
    seconds[0] += 60
    clock.restart(20)  # the run went back to a checkpoint
    assert not clock.is_due(21)
    seconds[0] += 60
    assert clock.is_due(22)


def _saved_by():
    seconds, asked = [0.0], [0]

    def now():
        asked[0] += 1
        return seconds[0]

    clock = SaveClock(10, now=now)
    clock.restart(0)
    due = []
    for step in range(1, 1500):
        seconds[0] += 1 + dist.get_rank()  # the clocks of machines differ
        if clock.is_due(step):
            due.append(step)
            clock.restart(step)
    return due, asked[0]


def test_processes_save_by_the_clock_of_one_and_seldom_ask():
    (first, asked), (second, _) = run_ranks(2, _saved_by, start_group=True)
    assert [600, 1200] == first == second
    assert asked < 45
