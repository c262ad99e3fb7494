"""`fgcli watch` in the terminal: what it shows, how soon, and how it ends."""

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time

import pytest

from forgather.cli.character_plot import PlottedCurve, plot_lines
from forgather.cli.commands import watch
from forgather.cli.main import main
from forgather.run_status import Status, load_status, write_status
from forgather.runs import watched_runs
from tests.patience import patience
from tests.runs.corpus import make_run

LIVE = {"updated": time.time(), "step": 200, "max_steps": 1000}
SECRET = "hf_" + 6 * "aB3dE5"


def log(folder, **record):
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps(record) + "\n")


def ended(folder, status, **changes):
    write_status(str(folder), dataclasses.replace(load_status(str(folder)), status=status, **changes))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(watched_runs, "_SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(watched_runs, "_SEARCH_SHARE", 100.0)
    monkeypatch.setenv("COLUMNS", "100")


def shown(capsys, *words):
    status = main(["watch", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_one_frame_shows_curves_step_bar_speed_time_left_memory_and_events(tmp_path, capsys):
    run = make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)
    log(run, event="anomaly", step=150, kind="spike", message="loss 9.1 is far above its median")
    log(run, event="control", step=160, action="pause")
    status, out, _ = shown(capsys, run, "--once")
    assert 0 == status
    for wanted in (
        run.name, "running", "step 200/1,000  ━━", "1.00k tokens/s", "0.1 s/step", "798.9 MiB", "1:20 left",
        "━ loss  ━ eval_loss", "eval_loss 2", "step 150: spike: loss 9.1 is far above", "! step 160: control: action pause",
    ):  # fmt: skip
        assert wanted in out, out
    assert any("⠀" < character <= "⣿" for character in out)


@pytest.mark.parametrize("width", [20, 40, 79, 113, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_frame_is_never_wider_than_the_terminal(tmp_path, capsys, monkeypatch, width, encoding):
    for number in range(3):
        make_run(tmp_path / "out", number, status=Status.RUNNING, **LIVE)
    monkeypatch.setenv("COLUMNS", str(width))
    if encoding == "ascii":
        monkeypatch.setattr(watch, "_has_braille", lambda: False)
    _, out, _ = shown(capsys, tmp_path, "--once")
    assert max(map(len, out.splitlines())) <= width
    assert encoding == "utf-8" or out.isascii()
    assert out.count("step 200") == (3 if width >= 113 else 2)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(Status.FINISHED, 0), (Status.FAILED, 1), (Status.INTERRUPTED, 4), (Status.KILLED, 3), (None, 3)],
)
def test_the_command_ends_with_the_run_and_its_exit_status_says_how(tmp_path, capsys, status, expected):
    run = make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)

    def end():
        time.sleep(0.1)
        log(run, step=201, time=time.time(), loss=0.5)
        if status is Status.KILLED:
            ended(run, Status.RUNNING, process_started=1)
        elif status is None:
            (run / "status.json").unlink()
        else:
            ended(run, status, cause={"code": None, "message": "ValueError: boom", "rank": 0}, step=201)

    thread = threading.Thread(target=end)
    thread.start()
    code, out, _ = shown(capsys, run)
    thread.join()
    last = out.splitlines()[-1]
    assert (expected, True) == (code, last.startswith(str(status or "unknown")))
    most = "1,000" if status else "200"  # the one of `summary.json`
    assert f"step 201/{most}" in last and "loss 0.5" in last
    assert ("ValueError: boom" in last) == (status not in (Status.KILLED, None))
    # The state of a run that has ended is the same for whoever comes later.
    assert expected == shown(capsys, run, "--once")[0]


def test_an_appended_metric_is_visible_within_two_seconds(tmp_path, record_property):
    run = make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)
    command = [sys.executable, "-m", "forgather", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert "step 200/1,000" in process.stdout.readline()
        delays = []
        for step in (210, 220):
            begin = time.monotonic()
            log(run, step=step, time=time.time(), loss=step / 1000)
            assert f"step {step}/1,000  loss {step / 1000:g}" in process.stdout.readline()
            delays.append(time.monotonic() - begin)
        record_property("seconds_to_visible", max(delays))
        assert max(delays) < max(2.0, patience(1.0))
    finally:
        ended(run, Status.FINISHED)
        assert 0 == process.wait(patience(10))
        process.stdout.close()


def test_json_has_a_snapshot_for_each_change(tmp_path, capsys):
    run = make_run(tmp_path / "out", status=Status.RUNNING, lines=2, **LIVE)
    log(run, step=200, loss="nan")

    def grow():
        time.sleep(0.1)
        log(run, event="anomaly", step=200, kind="nan", message="loss is nan")
        time.sleep(0.1)
        ended(run, Status.FINISHED)

    thread = threading.Thread(target=grow)
    thread.start()
    code, out, _ = shown(capsys, run, "--json")
    thread.join()
    found = [json.loads(line, parse_constant=pytest.fail)["runs"][0] for line in out.splitlines()]
    assert 0 == code and 3 == len(found)
    assert ["running", "running", "finished"] == [one["status"] for one in found]
    assert [0, 1, 1] == [len(one["events"]) for one in found]
    assert "nan" == found[0]["metrics"]["loss"]


def test_a_torn_line_is_harmless_and_a_rewound_run_is_read_again(tmp_path):
    run = make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)
    watched = watched_runs.WatchedRuns([str(run)])
    watched.update()
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 300, "lo')
    assert not watched.update()
    (run / "metrics.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    ended(run, Status.RUNNING, step=50)
    assert watched.update()
    live = watched.live[str(run)]
    assert (50, 50, watched.version) == (live.summary.step, live.curves["loss"].last_step, live.restarted)


def test_a_folder_shows_runs_as_they_start_and_keeps_those_that_end(tmp_path):
    over = make_run(tmp_path / "out", 0)
    watched = watched_runs.WatchedRuns([], [str(tmp_path)])
    watched.update()
    assert [] == watched.summaries()
    runs = [make_run(tmp_path / "out", number, status=Status.RUNNING, **LIVE) for number in (1, 2)]
    assert watched.update()
    ended(runs[0], Status.FINISHED)
    assert watched.update()
    assert [(runs[1].name, "running"), (runs[0].name, "finished")] == [
        (run.name, run.status) for run in watched.summaries()
    ]
    assert str(over) not in watched.live
    (runs[1] / "metrics.jsonl").unlink()
    for file in runs[1].iterdir():
        file.unlink()
    assert watched.update()
    assert [runs[0].name] == [run.name for run in watched.summaries()]


def test_more_runs_than_are_followed_take_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_runs, "MAX_FOLLOWED", 2)
    runs = [make_run(tmp_path / "out", number, status=Status.RUNNING, **LIVE) for number in range(3)]
    watched = watched_runs.WatchedRuns([], [str(tmp_path)])
    watched.update()
    assert {str(run) for run in runs[:2]} == set(watched.live)
    ended(runs[0], Status.FINISHED)
    watched.update()
    ended(runs[2], Status.RUNNING, step=300)
    watched.update()
    assert {str(runs[1]), str(runs[2])} == set(watched.live)


@pytest.mark.parametrize("goal", ["minimize", "maximize"])
def test_a_sweep_has_a_table_with_the_best_trial_first_and_the_values_that_differ(tmp_path, capsys, goal):
    record = {"event": "sweep", "form": 1, "metric": "eval_loss", "goal": goal}
    trials = [{"event": "trial", "trial": number, "values": {}, "skipped": None} for number in range(6)]
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (record, *trials)))
    for number, (lr, loss, status) in enumerate(
        [(0.1, 3.0, Status.FINISHED), (0.2, 1.0, Status.RUNNING), (0.3, 2.0, Status.FAILED), (0.4, 5.0, None)]
    ):
        resumed = {"args.resume_from_checkpoint": "auto"} if number == 1 else {}
        make_run(tmp_path / "trials" / f"{number:04}", number, lr=lr, loss=loss, status=status,
                 changes={"optimizer.lr": str(lr), **resumed}, **LIVE)  # fmt: skip
    # A first attempt at a trial is not a trial of its own, and that a trial goes on after one is no value of its config.
    make_run(tmp_path / "trials" / "0001", 9, lr=0.2, loss=0.1, status=Status.KILLED, started=1.0, record={
        "started": "2025-01-01T00:00:00+00:00"})  # fmt: skip
    _, out, _ = shown(capsys, tmp_path, "--once")
    head, *lines = out.splitlines()
    assert head.startswith(f"sweep {tmp_path.name}  6 trials: ") and head.endswith(", 2 to start")
    assert "1 running" in head and "1 failed" in head
    # The panel says which trial it draws: the runs of trials that start together have the same name.
    assert any(line.startswith("╭─ 0001 · lr 0.2  running") for line in lines), out
    rows = [re.split(r"  +", line.strip()) for line in lines[:5]]
    assert ["run", "status", "step", "best eval_loss", "lr"] == rows[0]
    best = {"minimize": ["0001", "0002", "0000", "0003"], "maximize": ["0003", "0000", "0002", "0001"]}
    assert best[goal] == [row[0] for row in rows[1:]]
    assert ["0001", "running", "200/1,000", "0.9" if goal == "minimize" else "1", "0.2"] in rows


def test_the_table_of_a_sweep_that_has_ended_takes_the_whole_frame(tmp_path, capsys):
    (tmp_path / "trials.jsonl").write_text('{"event": "sweep", "form": 1}\n')
    for number in range(12):
        make_run(tmp_path / "trials" / f"{number:04}", number, lr=number + 1)
    _, out, _ = shown(capsys, tmp_path, "--once")
    assert [f"{number:04}" for number in range(12)] == [line[:4] for line in out.splitlines()[2:]]


def test_without_a_word_the_newest_run_that_goes_on_is_watched(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = shown(capsys)
    assert 1 == code and "error[FG550]: there is no run below" in err and "fgcli watch ." in err
    live = make_run(tmp_path / "out", 0, status=Status.RUNNING, **LIVE)
    last = make_run(tmp_path / "out", 1)
    assert live.name in shown(capsys, "--once")[1]
    assert "" == shown(capsys, "--once")[2]
    ended(live, Status.FINISHED)
    _, out, err = shown(capsys, "--once")
    assert last.name in out
    assert "no run goes on below ." in err and "'fgcli watch .' waits for others" in err
    code, out, _ = shown(capsys, ".", "--once")
    assert (0, True) == (code, "no run goes on below ." in out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "error[FG500]: there is no run 'nothing'"),
        (["--port", "80"], "error[FG551]: --port 80 is given without --serve"),
        (["--serve", "--port", "70000"], "error[FG551]: --port 70000 is no port"),
        (["--serve", "--once"], "error[FG551]: --serve goes with neither"),
    ],
)
def test_a_wrong_word_is_one_located_sentence(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = shown(capsys, *words)
    assert 1 == code and err.startswith(said) and "help: " in err


def test_texts_of_a_run_reach_the_terminal_without_codes_and_secrets(tmp_path, capsys):
    run = make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)
    log(run, event="\x1b[2J", step=1, message=f"a {SECRET} \x1b[31m\r\n\x07")
    log(run, step=201, **{"\x1b]0;t\x07loss": 1.0})
    for words in (["--once"], ["--json", "--once"]):
        _, out, _ = shown(capsys, run, *words)
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", out) and SECRET not in out


@pytest.mark.parametrize("damage", [b"\xff" * 300, b"[1, 2]\n" * 5, b'{"step": {"a": 1}, "loss": []}\n', b"\n\n\n"])
def test_a_damaged_file_of_metrics_costs_only_its_lines(tmp_path, capsys, damage):
    run = make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(damage + b"\n" + content)
    code, out, _ = shown(capsys, run, "--once")
    assert 0 == code and "eval_loss 2" in out
    number = {0xFF: 1, ord("["): 5, ord("{"): 1}.get(damage[0], 0)
    told = f"{number} damaged line{'s' if number > 1 else ''} left out: line{'s' if number > 1 else ''} 1"
    assert (told in out) == (number > 0)


def test_on_a_terminal_the_last_frame_stays(tmp_path):
    """In a pseudo terminal of 90 columns: frames are drawn over one another, and the last one is left."""
    run = make_run(tmp_path / "out")
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "24"}
    process = subprocess.Popen([sys.executable, "-m", "forgather", "watch", str(run)], stdout=theirs, env=env)
    os.close(theirs)
    content = b""
    while part := _read(ours):
        content += part
    os.close(ours)
    assert 0 == process.wait(patience(10))
    alternate, _, left = content.decode().rpartition("\x1b[?1049l")
    assert "\x1b[?1049h" in alternate and "step 200/200" in left
    # The frames that are drawn over one another look like the one that is left.
    assert all("╭" in drawn and re.search("[⠁-⣿]", drawn) for drawn in (alternate, left))


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the terminal is closed
        return b""


@pytest.mark.parametrize("is_braille", [True, False])
def test_a_plot_has_a_dot_for_each_point_and_a_log_axis_where_it_says_so(is_braille):
    points = [(0, 1.0), (50, 1000.0), (100, 1.0)]
    lines = plot_lines([PlottedCurve("a", points)], width=30, height=5, label="{:g}".format, is_braille=is_braille)
    texts = [line.plain for line in lines]
    assert 6 == len(texts) and texts[-1].endswith("100  log")
    assert texts[0].split()[0] == "1000" and texts[4].split()[0] == "1"
    columns = [[at for at, character in enumerate(text[9:]) if character != " "] for text in texts[:5]]
    # 21 columns: up from the first one to the middle, and down to the last one.
    assert all(columns) and columns[0][0] <= 10 <= columns[0][-1]
    assert (0, 20) == (columns[4][0], columns[4][-1])
    assert [] == plot_lines([PlottedCurve("a", points)], width=8, height=5, label=str)
    assert [] == plot_lines([], width=80, height=5, label=str)
    for values in ([5.0], [1e308, -1e308], [0.0, 0.0]):
        curve = PlottedCurve("a", list(enumerate(values)))
        assert 6 == len(plot_lines([curve], width=40, height=5, label=str, is_braille=is_braille))
