import functools
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from forgather.ml.callbacks import JsonLogger, TBLogger
from forgather.ml.metrics import read_metrics
from tests.ml.callback_scene import arguments, control, state


def log(callback, args, *logs):
    callback.on_train_begin(args, state(), control())
    for step, values in enumerate(logs, start=1):
        callback.on_log(args, state(step), control(), logs=values)
    callback.on_train_end(args, state(len(logs)), control())


def test_each_log_is_one_line_with_step_and_plain_names(tmp_path):
    log(JsonLogger(), arguments(tmp_path), {"loss": 2.5, "learning_rate": 1e-3}, {"eval_loss": torch.tensor(2.0)})
    records = read_metrics(tmp_path)
    times = [record.pop("time") for record in records]
    assert records == [{"step": 1, "loss": 2.5, "learning_rate": 1e-3}, {"step": 2, "eval_loss": 2.0}]
    assert times == sorted(times)


def test_each_line_is_on_disk_when_the_event_returns(tmp_path):
    callback = JsonLogger()
    for step in (1, 2, 3):
        callback.on_log(arguments(tmp_path), state(step), control(), logs={"loss": 1.0})
        assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, step + 1))


def test_the_seed_spelling_of_the_json_logger_works(tmp_path):
    from forgather.ml.json_logger import JsonLogger as ByDottedName

    log(ByDottedName(name="Distributed Training", rank_filter=0), arguments(tmp_path), {"loss": 1.0})
    assert read_metrics(tmp_path)[0]["name"] == "Distributed Training"


def test_other_ranks_write_nothing(tmp_path):
    log(JsonLogger(), arguments(tmp_path, process_index=1), {"loss": 1.0})
    log(TBLogger(), arguments(tmp_path, process_index=1), {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_without_a_filter_each_rank_has_its_own_file(tmp_path):
    for rank in (0, 1):
        log(JsonLogger(rank_filter=None), arguments(tmp_path, process_index=rank), {"loss": float(rank)})
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] == 0.0
    assert read_metrics(tmp_path / "metrics.rank1.jsonl")[0]["loss"] == 1.0


def test_a_path_and_a_run_dir_take_the_place_of_the_logging_dir(tmp_path):
    log(JsonLogger(path=tmp_path / "a" / "mine.jsonl"), arguments(tmp_path / "unused"), {"loss": 1.0})
    log(JsonLogger(run_dir=tmp_path / "b"), arguments(tmp_path / "unused"), {"loss": 1.0})
    log(JsonLogger(), arguments(tmp_path / "c", logging_dir=None), {"loss": 1.0})
    found = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.jsonl"))
    assert found == ["a/mine.jsonl", "b/loss.jsonl", "b/metrics.jsonl", "c/runs/loss.jsonl", "c/runs/metrics.jsonl"]


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    log(JsonLogger(run_dir=tmp_path / "file" / "run"), arguments(tmp_path), {"loss": 1.0}, {"loss": 2.0})
    assert len(caplog.records) == 1


def scalars(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_scalars_in_groups_and_the_settings_as_text(tmp_path):
    log(
        TBLogger(experiment_info={"author": "me"}),
        arguments(tmp_path),
        {"loss": 2.5, "note": "text"},
        {"eval_loss": 2.0},
    )
    assert scalars(tmp_path) == {"train/loss": [(1, 2.5)], "eval/loss": [(2, 2.0)]}
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    assert {"args/text_summary", "experiment/text_summary"} <= set(tags)


def test_the_seed_spelling_of_the_tensorboard_logger_works(tmp_path):
    from forgather.ml.tb_logger import TBLogger as ByDottedName

    log(ByDottedName(SummaryWriter(tmp_path / "tb")), arguments(tmp_path / "unused"), {"loss": 1.5})
    assert scalars(tmp_path / "tb") == {"train/loss": [(1, 1.5)]}
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(("keywords", "folder"), [({}, "run"), ({"log_dir": None}, "run"), ({"log_dir": "own"}, "own")])
def test_a_partial_of_a_writer_writes_nothing_before_the_training(tmp_path, monkeypatch, keywords, folder):
    monkeypatch.chdir(tmp_path)
    unused, used = (TBLogger(functools.partial(SummaryWriter, **keywords), run_dir=tmp_path / "run") for _ in range(2))
    unused.on_train_end(arguments(tmp_path), state(), control())
    assert [] == list(tmp_path.iterdir())
    log(used, arguments(tmp_path / "unused"), {"loss": 1.5})
    assert [folder] == [entry.name for entry in tmp_path.iterdir()]


def test_what_a_repeated_run_logs_again_stands_beside_without_times_speeds_and_memory(tmp_path):
    speeds = {"tokens_per_second": 9.0, "steps_per_second": 1.0, "memory_bytes": 5, "epoch": 0.5}
    timed = {"eval_runtime": 3.0, "eval_samples_per_second": 2.0, "train_runtime": 1.0, "train_tokens_per_second": 4.0}
    log(
        JsonLogger(), arguments(tmp_path), {"loss": 2.5, **speeds}, {"eval_loss": 2.0, **timed}, {"epoch": 1.0, **timed}
    )
    assert (
        '{"step": 1, "loss": 2.5, "epoch": 0.5}\n{"step": 2, "eval_loss": 2.0}\n'
        == (tmp_path / "loss.jsonl").read_text()
    )
    assert 3 == len(read_metrics(tmp_path))


def test_a_rewind_hides_what_came_after_it_and_keeps_how_the_writer_was_made(tmp_path):
    args = arguments(tmp_path)
    logger = TBLogger(functools.partial(SummaryWriter, filename_suffix=".mine", flush_secs=7))
    logger.on_train_begin(args, state(), control())
    for step in (1, 2, 3):
        logger.on_log(args, state(step), control(), logs={"loss": float(step)})
    # TensorBoard reads files in the order of their names, which have a second and then a counter without leading zeros.
    time.sleep(1 - time.time() % 1)
    logger.on_rewind(args, state(1), control())
    logger.on_log(args, state(2), control(), logs={"loss": 20.0})
    logger.on_train_end(args, state(2), control())
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(1, 1.0), (2, 20.0)] == [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert 7 == logger.summary_writer.flush_secs
    assert all(file.name.endswith(".mine") for file in tmp_path.glob("events.out.tfevents.*"))
