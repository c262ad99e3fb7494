"""Runs of other programs become run folders: the same numbers, once, without secrets; a damaged file is one sentence."""

import base64
import json
import math
import os
import struct
import zlib
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.config.materialize import materialize
from forgather.runs import tensorboard_files, wandb_files
from forgather.runs.foreign_run import DamagedFileError, metric_names
from forgather.runs.run_table import read_table

RECORD = json.loads((Path(__file__).parent / "recorded/wandb_file.json").read_text())
WANDB = base64.b64decode(RECORD["file"])
EXPECTED = [
    *({"step": 10 * step, "loss": 5.0 / step} for step in range(1, 6)),
    {"step": 50, "eval_loss": 1.5},
    {"step": 60, "loss": "nan"},
    {"step": 70, "loss": 0.5},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def wandb_file(here):
    file = here / "wandb/offline-run-20260101_000000-abc123/run-abc123.wandb"
    file.parent.mkdir(parents=True)
    file.write_bytes(WANDB)
    return file


def events(folder, values, *, purge=None, suffix=""):
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    if purge is not None:
        writer.add_event(Event(wall_time=5.0, step=purge, session_log=SessionLog(status=SessionLog.START)))
    for step, name, value in values:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        writer.add_event(Event(wall_time=1e9 + step, step=step, summary=summary))
    writer.close()
    return next(folder.glob(f"*.tfevents.*{suffix}"))


def imported(folder="imported"):
    (run,) = read_table([folder]).runs
    lines = [json.loads(line) for line in (Path(run.folder) / "metrics.jsonl").read_text().splitlines()]
    return run, [{name: value for name, value in line.items() if name != "time"} for line in lines]


def content(folder):
    return {str(file): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def test_a_file_of_wandb_gives_the_numbers_that_were_logged_and_none_of_its_secrets(wandb_file, capsys):
    assert 0 == main(["runs", "import", "wandb", "wandb"])
    run, lines = imported()
    assert EXPECTED == lines
    assert ("finished", 70, ("a", "b", "imported"), "many") == (
        run.status, run.step, run.labels.tags, run.labels.group,
    )  # fmt: skip
    assert {"learning_rate": "0.001", "optimizer.name": "adamw", "api_key": "(hidden)"}.items() <= run.changes.items()
    assert RECORD["config"]["api_key"] in RECORD["file"] or RECORD["config"]["api_key"].encode() in WANDB
    assert not any(RECORD["config"]["api_key"].encode() in text for text in content("imported").values())
    # The notes of five lines and the long text of one.
    assert "6 values that are no numbers of a step left out" in capsys.readouterr().out


AWKWARD = {
    "a.b": {"c d": "{{ x }} {% y %} {# z #}", "-- e": [1, {"f{{": "${g}"}], "<<": {}, "lr": 1e-5}, "nan": math.nan, "## h": True,
    "inf": [-math.inf, "Infinity NaN"], "text": "two\nlines: # no comment", "!var:x": None, "umlaut": "\u00e4 \U0001f600 \x07",
}  # fmt: skip


def test_any_config_of_another_program_is_a_graph_with_the_same_values(here):
    from forgather.project.run_reader import open_run
    from forgather.runs.foreign_run import ForeignRun, write_imported

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    for config in ({}, AWKWARD):
        run = ForeignRun(tool="wandb", identity=str(config), name="n", source="s", config=config)
        folder, _ = write_imported(run, "imported")
        built = materialize(open_run(folder).built)
        assert repr(config) == repr(plain(built))


def test_imported_runs_can_be_compared(wandb_file, capsys):
    events(Path("logs"), [(step, "eval/loss", 9.0 / step) for step in range(1, 6)])
    assert 0 == main(["runs", "import", "wandb", "wandb"])
    assert 0 == main(["runs", "import", "tensorboard", "logs"])
    capsys.readouterr()
    assert 0 == main(["compare", *map(str, sorted(Path("imported/runs").iterdir())), "--metric", "eval_loss"])
    told = capsys.readouterr().out
    assert "1.5" in told and "1.8" in told
    assert "learning_rate" in told


def test_a_second_import_changes_nothing_and_a_longer_file_updates_the_run(wandb_file):
    wandb_file.write_bytes(WANDB[: len(WANDB) // 2])
    assert 0 == main(["runs", "import", "wandb", "wandb"])
    run, lines = imported()
    assert EXPECTED[: len(lines)] == lines
    assert run.status is None
    labels = Path(run.folder) / "labels.json"
    labels.write_text(json.dumps({"tags": ["mine"]}))
    before = content("imported")
    assert 0 == main(["runs", "import", "wandb", str(wandb_file)])
    assert before == content("imported")
    wandb_file.write_bytes(WANDB)
    assert 0 == main(["runs", "import", "wandb", "wandb"])
    run, lines = imported()
    assert (EXPECTED, ("mine",)) == (lines, run.labels.tags)


def read_wandb(file, data):
    file.write_bytes(data)
    return [{name: value for name, value in line.items() if name != "time"} for line in
            wandb_files.read_run(str(file), [str(file)], str(file)).lines]  # fmt: skip


def test_a_file_of_wandb_that_was_cut_gives_its_first_lines(tmp_path):
    file = tmp_path / "run-x.wandb"
    for size in {*range(7, 4000, 97), *range(4000, len(WANDB), 2999), *range(len(WANDB) - 20, len(WANDB))}:
        try:
            lines = read_wandb(file, WANDB[:size])
        except DamagedFileError as error:
            assert "nothing about a run" in str(error) and size < 1000
            continue
        assert [line["step"] for line in EXPECTED][: len(lines)] == [line["step"] for line in lines]


def test_a_changed_byte_of_a_file_of_wandb_is_a_sentence_and_never_another_number(tmp_path):
    file = tmp_path / "run-x.wandb"
    whole = read_wandb(file, WANDB)
    for at in [*range(20), *range(20, 4000, 61), *range(4000, len(WANDB), 1999)]:
        data = bytearray(WANDB)
        data[at] ^= 0x41
        try:
            lines = read_wandb(file, bytes(data))
        except DamagedFileError:
            continue
        # A changed length can only cut the file; and the version in the header is not a number of a run.
        assert str(whole[: len(lines)]) == str(lines)


def frame(data, kind=1):
    return struct.pack("<IHB", zlib.crc32(data, zlib.crc32(bytes([kind]))), len(data), kind) + data


def made_wandb(history, *, config=(), **run):
    """A file of W&B with one run, whose values are JSON texts."""
    message = wandb_files._message("Record")
    records = [
        message(run={"run_id": "a", "config": {"item": [{"key": k, "value_json": v} for k, v in config]}, **run})
    ]
    for line in history:
        records.append(message(history={"item": [{"key": key, "value_json": value} for key, value in line]}))
    return WANDB[:7] + b"".join(frame(record.SerializeToString()) for record in records)


NUMBERS = ["NaN", "Infinity", "-Infinity", "-1e308", "9" * 400, "null", "true", '"x"', "[]"]


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", ["_step", "_timestamp", "train/global_step", "loss"])
def test_a_number_that_no_clock_or_step_has_costs_itself_alone(here, name, value):
    line = [("_step", "2"), ("loss", "0.5")]
    Path("run-a.wandb").write_bytes(made_wandb([line, [(name, value), ("eval/loss", "0.25")]]))
    assert 0 == main(["runs", "import", "wandb", "run-a.wandb"])
    assert [0.5, 0.25] == [imported()[1][0]["loss"], imported()[1][1]["eval_loss"]]


@pytest.mark.parametrize("seconds", [0, -5, 2**62, 253402300800])
def test_a_start_that_is_in_no_year_is_unknown(here, seconds):
    Path("run-a.wandb").write_bytes(made_wandb([[("loss", "1")]], start_time={"seconds": seconds}))
    assert 0 == main(["runs", "import", "wandb", "run-a.wandb"])


def test_a_config_that_is_nested_without_end_is_a_sentence(here, capsys):
    Path("run-a.wandb").write_bytes(made_wandb([], config=[("a", "[" * 500 + "]" * 500)]))
    assert 1 == main(["runs", "import", "wandb", "run-a.wandb"])
    assert "its config is nested more than 50 times" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tail", [frame(b"", kind=4), frame(b"", kind=3), frame(b"", kind=2) + frame(b""), struct.pack("<IHB", 1, 40_000, 1) + b"x" * 99]
)  # fmt: skip
def test_a_part_of_a_record_alone_is_damage_and_no_end(tmp_path, tail):
    with pytest.raises(DamagedFileError, match="it is damaged at byte"):
        read_wandb(tmp_path / "run-x.wandb", made_wandb([[("loss", "1")]]) + tail)


def test_labels_of_the_user_stay_if_the_record_of_an_import_is_damaged(wandb_file):
    main(["runs", "import", "wandb", "wandb"])
    folder = Path(imported()[0].folder)
    (folder / "labels.json").write_text(json.dumps({"tags": ["mine"]}))
    (folder / "run.json").write_text("{")
    assert 0 == main(["runs", "import", "wandb", "wandb"])
    assert ("mine",) == imported()[0].labels.tags


@pytest.mark.parametrize("wall_time", [math.nan, math.inf, -1.0, 1e300])
def test_a_time_that_is_in_no_year_is_left_out(here, wall_time):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter("logs")
    summary = Summary(value=[Summary.Value(tag="loss", simple_value=1.5)])
    for step, at in ((1, wall_time), (2, 1e9)):
        writer.add_event(Event(wall_time=at, step=step, summary=summary))
    writer.close()
    assert 0 == main(["runs", "import", "tensorboard", "logs"])
    assert [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.5}] == imported()[1]


@pytest.mark.parametrize(("tool", "name"), [("wandb", "run-a.wandb"), ("tensorboard", "a.tfevents.b")])
def test_a_pipe_is_not_waited_for(here, capsys, tool, name):
    Path("logs").mkdir()
    os.mkfifo(f"logs/{name}")
    assert 1 == main(["runs", "import", tool, "logs"])
    assert "not a regular file" in capsys.readouterr().err


def test_event_files_of_tensorboard_give_the_numbers_and_leave_out_steps_that_were_trained_again(here, capsys):
    first = [(step, name, step / 4) for step in range(1, 7) for name in ("train/loss", "train/lr")]
    events(here / "logs/one", first, suffix=".a")
    events(here / "logs/one", [(5, "train/loss", 9.0), (5, "eval/loss", 8.0)], purge=5, suffix=".b")
    assert 0 == main(["runs", "import", "tensorboard", "logs"])
    run, lines = imported()
    expected = [{"step": step, "loss": step / 4, "lr": step / 4} for step in range(1, 5)]
    assert [*expected, {"step": 5, "loss": 9.0, "eval_loss": 8.0}] == lines
    assert (None, 5, ("imported",), "one") == (run.status, run.step, run.labels.tags, run.config)
    before = content("imported")
    assert 0 == main(["runs", "import", "tensorboard", "logs"])
    assert before == content("imported")
    assert "already imported" in capsys.readouterr().out


def test_tensorboard_itself_reads_the_same_numbers(here):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = [(step, "train/loss", math.sin(step)) for step in range(1, 50)]
    events(here / "logs", values[:40], suffix=".a")
    events(here / "logs", values[30:], purge=31, suffix=".b")
    theirs = EventAccumulator(str(here / "logs"), size_guidance={"scalars": 0}).Reload().Scalars("train/loss")
    (one,) = tensorboard_files.runs_of("logs")
    ours = tensorboard_files.read_run(*one, "logs").lines
    assert [(event.step, event.value) for event in theirs] == [(line["step"], line["loss"]) for line in ours]


def test_a_damaged_event_file_is_a_sentence_and_the_other_runs_are_imported(here, capsys):
    damaged = events(here / "logs/bad", [(1, "loss", 1.0), (2, "loss", 2.0)])
    data = bytearray(damaged.read_bytes())
    data[-10] ^= 1
    damaged.write_bytes(bytes(data))
    assert 1 == main(["runs", "import", "tensorboard", "logs/bad"])
    assert "error[FG581]: logs/bad is not imported: it is damaged at byte" in capsys.readouterr().err
    assert not Path("imported").exists()
    events(here / "logs/good", [(1, "loss", 1.0)])
    assert 1 == main(["runs", "import", "tensorboard", "logs"])
    assert "logs/bad is not imported: it is damaged" in capsys.readouterr().err
    assert [{"step": 1, "loss": 1.0}] == imported()[1]


def test_an_event_file_that_was_cut_gives_its_first_lines(here):
    file = events(here / "logs", [(step, "loss", 1.0) for step in range(1, 9)])
    data = file.read_bytes()
    for size in range(0, len(data), 13):
        file.write_bytes(data[:size])
        lines = tensorboard_files.read_run("logs", [str(file)], "logs").lines
        assert list(range(1, len(lines) + 1)) == [line["step"] for line in lines]


@pytest.mark.parametrize("tool", ["wandb", "tensorboard"])
def test_a_path_without_files_of_the_tool_is_refused(here, capsys, tool):
    for path in ("nowhere", "."):
        assert 1 == main(["runs", "import", tool, path])
        assert "error[FG580]" in capsys.readouterr().err


def test_a_file_of_something_else_is_a_sentence(here, capsys):
    Path("run-a.wandb").write_bytes(b"not a log")
    Path("a.tfevents.b").write_bytes(struct.pack("<QI", 5, 0) + b"hello")
    for tool, path in (("wandb", "run-a.wandb"), ("tensorboard", "a.tfevents.b")):
        assert 1 == main(["runs", "import", tool, path])
        assert "error[FG581]" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_a_sentence(wandb_file, capsys):
    Path("taken").write_text("")
    assert 1 == main(["runs", "import", "wandb", "wandb", "-o", "taken"])
    assert "error[FG582]: 'taken/runs/" in capsys.readouterr().err


def test_times_and_steps_that_no_run_has_are_left_out(here, capsys):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for number, wall_time in enumerate([1e300, math.inf, math.nan, -1e18]):
        writer = EventFileWriter(str(here / f"logs/{number}"))
        for step in (-(2**62), 1, 2**62):
            summary = Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
            writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))
        writer.close()
    assert 0 == main(["runs", "import", "tensorboard", "logs"])
    assert 4 == capsys.readouterr().out.count("(1 line of metrics, 2 values that are no numbers of a step left out)")
    assert [1] * 4 == [run.step for run in read_table(["imported"]).runs]


@pytest.mark.parametrize("step", [math.nan, math.inf, 10**400, None, "x"])
def test_a_line_of_wandb_without_a_usable_step_has_that_of_the_line_before(step):
    history = [{"_step": 4, "loss": 1.0}, {"_step": step, "loss": 0.5}]
    assert ([{"step": 4, "loss": 1.0}, {"step": 4, "loss": 0.5}], 0) == wandb_files._lines(history)


def test_names_of_trackers_become_ours_unless_two_would_become_one():
    assert {"train/loss": "loss", "eval/loss": "eval_loss", "test/f1": "test_f1"} == metric_names(
        ["train/loss", "eval/loss", "test/f1"]
    )
    assert {"loss": "loss", "train/loss": "train/loss", "step": "step_"} == metric_names(["loss", "train/loss", "step"])
    assert 4 == len(set(metric_names(["step", "step_", "time", "train/step"]).values()))
