import io
import json
import re

import pytest
from rich.console import Console

from forgather.ml.callbacks import RunSummaryCallback
from forgather.ml.report import write_report
from forgather.ml.task import Task
from tests.ml.callback_scene import arguments, control, state, tiny_model


def begun(folder, **scene):
    screen = io.StringIO()
    callback = RunSummaryCallback(console=Console(file=screen, width=200))
    callback.on_train_begin(arguments(folder, learning_rate=0.125), state(), control(), model=tiny_model(), **scene)
    return callback, screen


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_summary_of_a_run_under_way_gives_a_report_that_says_so(tmp_path):
    begun(tmp_path)
    assert summary(tmp_path)["status"] == "running"
    page = write_report(tmp_path).read_text()
    assert "running when last seen, step 0 of 10" in page
    assert "0.125" in page


@pytest.mark.parametrize(
    ("step", "error", "expected"),
    [
        (10, None, "finished"),
        (4, None, "stopped early"),
        (4, KeyboardInterrupt(), "interrupted"),
        (4, RuntimeError("out of memory"), "failed"),
    ],
)
def test_the_summary_says_how_the_run_ended(tmp_path, step, error, expected):
    callback, screen = begun(tmp_path)
    callback.on_train_end(arguments(tmp_path), state(step), control(), **({"error": error} if error else {}))
    assert summary(tmp_path)["status"] == expected
    assert f"run {expected}: {step} steps" in screen.getvalue()
    assert expected in (tmp_path / "report.html").read_text()


def test_a_model_without_a_config_is_listed_as_the_model(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    callback, screen = begun(tmp_path)
    callback.on_save(arguments(tmp_path), state(5), control())
    (tmp_path / "model.safetensors").write_bytes(b"weights of a plain module")
    callback.on_train_end(arguments(tmp_path), state(10), control())
    assert f"  model      {tmp_path}\n" in screen.getvalue() and "checkpoint" not in screen.getvalue()


def test_the_model_is_named_where_this_run_wrote_it_and_else_its_last_checkpoint(tmp_path):
    for name in ("checkpoint-7", "checkpoint-5"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.json").write_text("of an earlier run")
    callback, screen = begun(tmp_path)
    callback.on_train_end(arguments(tmp_path), state(10), control())
    assert {"report"} == set(summary(tmp_path)["places"])
    callback.on_save(arguments(tmp_path), state(5), control())
    callback.on_train_end(arguments(tmp_path), state(10), control())
    assert str(tmp_path / "checkpoint-5") == summary(tmp_path)["places"]["checkpoint"]
    assert "model" not in summary(tmp_path)["places"]
    (tmp_path / "written").write_text("{}")
    (tmp_path / "written").replace(tmp_path / "config.json")
    callback.on_train_end(arguments(tmp_path), state(10), control())
    assert str(tmp_path) == summary(tmp_path)["places"]["model"]
    assert f"model      {tmp_path}\n" in screen.getvalue()


@pytest.mark.parametrize(
    ("first", "last", "logs", "expected"),
    [
        (0, 10, {}, r"10 steps in \d+\.\d s\n"),
        (0, 10, {"tokens_per_second": 1200.0}, r"10 steps in \d+\.\d s \(median 1.20k tokens/s\)\n"),
        (0, 10, {"train_tokens_per_second": 1200.0}, r"10 steps in \d+\.\d s \(1.20k tokens/s\)\n"),
        (0, 10, {"train_skipped_steps": 3}, r"10 steps in \d+\.\d s; 3 steps of the run skipped as bad\n"),
        (9, 10, {}, r"1 step \(number 10\) in \d+\.\d s\n"),
        (8, 10, {}, r"2 steps \(9 to 10\) in \d+\.\d s\n"),
        (10, 10, {"train_runtime": 0.3}, r"nothing was trained, the run is at step 10\n"),
    ],
)
def test_the_summary_counts_the_steps_of_this_run_alone(tmp_path, first, last, logs, expected):
    screen = io.StringIO()
    callback = RunSummaryCallback(console=Console(file=screen, width=200), report=False)
    callback.on_train_begin(arguments(tmp_path), state(first), control(), model=tiny_model())
    callback.on_log(arguments(tmp_path), state(last), control(), logs=logs)
    callback.on_train_end(arguments(tmp_path), state(last), control())
    assert re.search(f"run finished: {expected}", screen.getvalue())


def test_a_loss_says_which_step_it_is_of_and_places_are_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback, screen = begun(tmp_path, task=Task(counts_tokens=True, has_perplexity=True))
    callback.on_log(arguments(tmp_path), state(1), control(), logs={"loss": 7.0})
    callback.on_log(arguments(tmp_path), state(3), control(), logs={"eval_loss": 6.0})
    callback.on_train_end(arguments(tmp_path), state(10), control())
    assert {"loss": 1, "eval_loss": 3} == summary(tmp_path)["final_steps"]
    assert "  loss       7.0000  (logged at step 1)\n" in screen.getvalue()
    assert "(perplexity 403.4, logged at step 3)\n" in screen.getvalue()
    assert "  report     report.html\n" in screen.getvalue()
    assert str(tmp_path) not in screen.getvalue()


def test_a_run_that_goes_on_knows_what_it_had_measured(tmp_path):
    screen = io.StringIO()
    callback = RunSummaryCallback(console=Console(file=screen, width=200), report=False)
    history = [
        {"step": 4, "loss": 7.0, "tokens_per_second": 9.0, "epoch": 1.0},
        {"step": 5, "eval_loss": 6.0, "eval_runtime": 1.0, "epoch": 1.25},
    ]
    callback.on_train_begin(arguments(tmp_path), state(5, log_history=history), control(), model=tiny_model())
    callback.on_train_end(arguments(tmp_path), state(5), control())
    assert {"loss": 7.0, "eval_loss": 6.0} == summary(tmp_path)["final"]
    assert {"loss": 4, "eval_loss": 5} == summary(tmp_path)["final_steps"]


def test_the_speed_is_the_median_of_the_logs(tmp_path):
    callback, _ = begun(tmp_path)
    for step, speed in enumerate([1.0, 100.0, 120.0], start=1):
        callback.on_log(arguments(tmp_path), state(step), control(), logs={"loss": 1.0, "tokens_per_second": speed})
    callback.on_train_end(arguments(tmp_path), state(10), control())
    assert summary(tmp_path)["tokens_per_second"] == 100.0


def test_other_ranks_write_nothing(tmp_path):
    callback = RunSummaryCallback()
    away = state(10, is_world_process_zero=False)
    callback.on_train_begin(arguments(tmp_path), away, control(), model=tiny_model())
    callback.on_train_end(arguments(tmp_path), away, control())
    assert list(tmp_path.iterdir()) == []
