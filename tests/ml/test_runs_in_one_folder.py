"""Several runs in one output folder: each knows its own checkpoints, and resuming takes the last run's."""

import io
import os
import re
from datetime import datetime
from pathlib import Path

from rich.console import Console

from forgather.ml import Trainer
from forgather.ml.callbacks import JsonLogger, RunSummaryCallback, TBLogger
from forgather.ml.checkpoint import checkpoint_folder, list_checkpoints, write_checkpoint
from forgather.ml.checkpoint.lineage import checkpoints_in_order, next_origin, origin_of
from forgather.ml.metrics import read_records
from forgather.ml.run_dir import own_run_folder
from tests.ml.fixtures import rows, tiny_llama


def test_a_run_folder_has_a_number_only_where_another_run_has_its_second(tmp_path, monkeypatch):
    monkeypatch.setattr("forgather.ml.run_dir.datetime", Noon)
    (tmp_path / "runs/20260101T120000Z").mkdir(parents=True)
    named = [own_run_folder(tmp_path).name for _ in range(2)]
    assert ["20260101T120000Z-2", "20260101T120000Z-3"] == named
    assert "20260101T120000Z" == own_run_folder(tmp_path / "other").name


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 1, 12, tzinfo=tz)


def trained(settings, resume=None, **given):
    args = settings(save_strategy="steps", save_steps=1, **given)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows())
    return trainer, trainer.train(resume)


def steps(folder):
    return [step for step, _ in list_checkpoints(Path(folder))]


def test_auto_takes_the_newest_checkpoint_of_the_run_that_wrote_last(settings, tmp_path, caplog):
    trained(settings, max_steps=9)
    trained(settings, max_steps=3)
    for step in steps(tmp_path / "out"):  # file times that tell the opposite
        os.utime(checkpoint_folder(tmp_path / "out", step), (1e9 + step, 1e9 + step))
    caplog.clear()
    trainer, _ = trained(settings, "auto", max_steps=5)
    assert 5 == trainer.state.global_step
    assert re.search(r"resuming from \S*/checkpoint-3 \(step 3 of 5, written \d\d:\d\d\)", caplog.text)
    assert "passed over checkpoint-9, checkpoint-8, checkpoint-7, checkpoint-6, 2 more" in caplog.text
    assert "(of an earlier run of 9 steps)" in caplog.text


def test_a_resumed_run_is_the_same_run(settings, tmp_path):
    trained(settings, max_steps=2)
    trained(settings, "auto", max_steps=4)
    origins = [origin_of(folder) for _, folder in list_checkpoints(tmp_path / "out")]
    assert 1 == len({origin.run for origin in origins})
    assert [(1, 2), (2, 2), (3, 4), (4, 4)] == [(origin.serial, origin.max_steps) for origin in origins]


def test_the_limit_of_a_run_removes_no_checkpoint_of_another(settings, tmp_path, caplog):
    trained(settings, max_steps=8, save_total_limit=2)
    trained(settings, max_steps=4, save_total_limit=1)
    assert [4, 7, 8] == steps(tmp_path / "out")
    assert (
        "2 checkpoints of an earlier run, up to step 8: this run starts from the beginning, keeps them" in caplog.text
    )


def test_one_checkpoint_of_an_earlier_run_is_one(settings, tmp_path, caplog):
    trained(settings, max_steps=1, save_total_limit=1)
    trained(settings, max_steps=1, save_total_limit=1)
    assert "holds 1 checkpoint of an earlier run, up to step 1: this run starts from the beginning, keeps it" in (
        caplog.text
    )


def test_checkpoints_that_do_not_tell_their_run_are_older_than_those_that_do(tmp_path):
    def fill(draft):
        draft.write("a", [b"a"])

    for step in (10, 9):
        write_checkpoint(tmp_path, step, fill)
    write_checkpoint(tmp_path, 2, fill, facts={"run": next_origin(tmp_path, "one", 5)})
    write_checkpoint(tmp_path, 3, fill, facts={"run": next_origin(tmp_path, "two", 5)})
    write_checkpoint(tmp_path, 1, fill, facts={"run": next_origin(tmp_path, "one", 5)})
    assert ["9", "10", "3", "2", "1"] == [
        folder.name.rpartition("-")[2] for folder, _ in checkpoints_in_order(tmp_path)
    ]


def test_runs_that_nobody_named_a_folder_for_keep_their_records_apart(settings, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for _ in range(2):
        args = settings(logging_strategy="steps", logging_steps=1, max_steps=2)
        callbacks = [JsonLogger(), TBLogger(), RunSummaryCallback(console=Console(file=io.StringIO()))]
        Trainer(tiny_llama(), args, train_dataset=rows(), callbacks=callbacks).train()
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    assert 2 == len(runs)
    for run in runs:
        assert re.fullmatch(r"\d{8}T\d{6}Z(-\d+)?", run.name)
        assert [1, 2, 2] == [line["step"] for line in read_records(run / "metrics.jsonl")]
        assert 1 == len(list(run.glob("events.out.tfevents.*")))
    assert [] == list((tmp_path / "work").iterdir())
