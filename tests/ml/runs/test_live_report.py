"""A run that goes on has a report, can be watched and attacked, and computes what it computes alone."""

import dataclasses
import json
import os
import re
import threading
import time

import pytest
import torch

from forgather.heartbeat import Heartbeat
from forgather.ml.callbacks import JsonLogger, RunSummaryCallback
from forgather.ml.callbacks import summary as summary_module
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.report import write_report
from forgather.run_status import Status, load_status, write_status
from forgather.runs.watch_server import WatchServer
from forgather.runs.watched_runs import WatchedRuns
from tests.ml.callback_scene import arguments, control, state, tiny_model, trainer
from tests.runs.hostile_page_requests import HOSTILE, exchange, status_of

STEPS = 40


class Reader(TrainerCallback):
    """Reads the report at the end of each step, as a browser would."""

    def __init__(self, folder):
        self.file, self.seen = folder / "report.html", []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(badge(self.file.read_text()))


def badge(page):
    return re.search(r'class="badge \w+">([^<]*)<', page)[1]


def trained(folder, *callbacks, report=True, steps=STEPS, **settings):
    """Returns the losses and the weights of a run with a heartbeat."""
    folder.mkdir()
    callbacks = [JsonLogger(run_dir=folder), RunSummaryCallback(run_dir=folder, report=report, **settings), *callbacks]
    with Heartbeat(str(folder), started=time.time()) as heartbeat:
        main = trainer("ours", folder / "out", callbacks, max_steps=steps, logging_steps=1)
        heartbeat.watch(main)
        main.train()
    return (folder / "loss.jsonl").read_bytes(), [weight.clone() for weight in main.model.state_dict().values()]


def is_same(ours, alone):
    return ours[0] == alone[0] and all(map(torch.equal, ours[1], alone[1]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses and weights without a report and without a reader."""
    return trained(tmp_path_factory.mktemp("alone") / "run", report=False)


def test_the_report_is_there_at_the_first_step_and_grows_and_changes_no_number(tmp_path, alone, monkeypatch):
    monkeypatch.setattr(summary_module, "_REPORT_SHARE", 1.0)
    reader = Reader(tmp_path / "run")
    assert is_same(trained(tmp_path / "run", reader, refresh_seconds=0.0), alone)
    assert STEPS == len(reader.seen) and "running, step 0 of 40" == reader.seen[0]
    steps = [int(re.fullmatch(r"running, step (\d+) of 40", text)[1]) for text in reader.seen]
    assert steps == sorted(steps) and len(set(steps)) > 2
    assert "finished" == badge((tmp_path / "run" / "report.html").read_text())
    assert ["report.html"] == [file.name for file in (tmp_path / "run").glob("*report*")]  # no draft stays


def test_a_fast_run_writes_its_report_at_its_begin_and_at_its_end_alone(tmp_path, alone, monkeypatch):
    written = []
    monkeypatch.setattr(summary_module, "write_report", lambda folder: written.append(write_report(folder)))
    assert is_same(trained(tmp_path / "run"), alone)
    assert 2 == len(written)


def test_reports_of_a_run_that_goes_on_take_one_hundredth_of_its_time(tmp_path, monkeypatch, record_property):
    """With a clock of its own: each log is after a second, and a report takes three, and later ten."""
    now, cost, spent = [1000.0], [3.0], [0.0]

    def write(folder):
        now[0] += cost[0]
        spent[0] += cost[0]

    monkeypatch.setattr(summary_module, "write_report", write)
    monkeypatch.setattr(summary_module.time, "monotonic", lambda: now[0])
    callback = RunSummaryCallback()
    callback.on_train_begin(arguments(tmp_path), state(), control(), model=tiny_model())
    first = spent[0]
    for step in range(1, 20_000):
        now[0] += 1
        cost[0] = 3.0 if step < 10_000 else 10.0
        callback.on_log(arguments(tmp_path), state(step), control(), logs={"loss": 1.0})
    share = (spent[0] - first) / (now[0] - 1000.0)
    record_property("share_of_time", share)
    assert 0.005 < share <= 0.0101


def test_a_report_that_cannot_be_written_is_not_tried_at_each_log(tmp_path, monkeypatch):
    tries = []

    def write(folder):
        tries.append(folder)
        raise OSError("disk full")

    monkeypatch.setattr(summary_module, "write_report", write)
    callback = RunSummaryCallback()
    callback.on_train_begin(arguments(tmp_path), state(), control(), model=tiny_model())
    for step in range(1, 100):
        callback.on_log(arguments(tmp_path), state(step), control(), logs={"loss": 1.0})
    assert 1 == len(tries)
    assert "running" == json.loads((tmp_path / "summary.json").read_text())["status"]


@pytest.mark.parametrize(
    ("status", "changes", "expected"),
    [
        (Status.RUNNING, {}, "running, step 120 of 500"),
        (Status.PAUSED, {}, "paused, step 120 of 500"),
        (Status.RUNNING, {"process_started": 1}, "killed, step 120 of 500"),
        (Status.INTERRUPTED, {}, "interrupted, step 120 of 500"),
        (Status.FAILED, {"cause": {"code": None, "message": "ValueError: boom", "rank": 1}}, "failed, step 120 of 500"),
    ],
)
def test_the_report_of_a_run_without_an_end_says_what_it_does_and_when_it_was_seen(tmp_path, status, changes, expected):
    callback = RunSummaryCallback()
    with Heartbeat(str(tmp_path), started=1_767_225_600.0):
        callback.on_train_begin(arguments(tmp_path), state(max_steps=500), control(), model=tiny_model())
        known = dataclasses.replace(load_status(str(tmp_path)), updated=1_767_225_700.0, step=120, max_steps=500)
        write_status(str(tmp_path), dataclasses.replace(known, status=status, **changes))
        page = write_report(tmp_path).read_text()
    assert expected == badge(page)
    assert ">last seen 2026-01-01 00:01:40 UTC<" in page
    assert ("data-live>" in page) == (status.is_live and not changes)
    assert ("The run ended by ValueError: boom" in page) == (status is Status.FAILED)


def test_a_run_that_is_attacked_while_it_is_watched_computes_the_same(tmp_path, alone, record_property):
    watched = WatchedRuns([], [str(tmp_path)])
    stopped, refused, taken = threading.Event(), [], []

    def attack(server):
        while not stopped.is_set():
            for name, request in HOSTILE.items():
                code = status_of(exchange(server, request(server)))
                (taken if code is not None and code < 400 else refused).append(name)

    with WatchServer(watched) as server:
        threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}),
            threading.Thread(target=attack, args=(server,)),
        ]
        for thread in threads:
            thread.start()
        try:
            ours = trained(tmp_path / "run")
            while len(set(refused) | set(taken)) < len(HOSTILE):
                time.sleep(0.01)
        finally:
            stopped.set()
            threads[1].join()
            server.shutdown()
            threads[0].join()
    record_property("hostile_requests", len(HOSTILE))
    assert ([], set(HOSTILE)) == (taken, set(refused))
    assert is_same(ours, alone)


def test_a_damaged_run_folder_has_a_report(tmp_path):
    (tmp_path / "summary.json").write_text(
        json.dumps({"status": "running", "started": "x", "step": "many", "max_steps": [1]})
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "time": 1e9, "loss": 1.0}\n{"step": true, "time": 1e300}\n')
    page = write_report(tmp_path).read_text()
    assert "running when last seen, step 5" == badge(page) and os.path.getsize(tmp_path / "report.html") == len(
        page.encode()
    )
