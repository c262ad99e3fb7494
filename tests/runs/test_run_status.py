"""A run that ended is never running: kills of every kind, numbers of processes that return, reboots, other machines."""

import dataclasses
import faulthandler
import json
import os
import random
import resource
import signal
import tempfile
import time

import pytest

from forgather import run_status
from forgather.folder_lock import folder_lock
from forgather.heartbeat import Heartbeat, current_heartbeat
from forgather.interrupt import Interrupt, handle_signals
from forgather.run_status import (
    STALE_SECONDS,
    STATUS_FILE,
    RunStatus,
    Status,
    StatusError,
    load_status,
    of_this_process,
    read_status,
    record_cause,
    write_status,
)

KILLS = {
    "SIGKILL": (Status.KILLED, None),
    "SIGSEGV": (Status.KILLED, None),
    "_exit": (Status.KILLED, None),
    "memory": (Status.FAILED, "MemoryError"),
    "SIGTERM": (Status.INTERRUPTED, None),
}


def dies(how):
    if how == "memory":
        raise MemoryError
    if how == "_exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))
    signal.pause()


def in_child(body):
    """Forks a process that runs `body`, and returns its number."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            faulthandler.disable()
            body()
        except BaseException:  # noqa: BLE001 - the child of a test ends here in any case
            os._exit(1)
        os._exit(0)
    return child


def run_and_die(folder, how, seconds):
    with handle_signals(Interrupt()), Heartbeat(folder, started=time.time(), beat_seconds=0.002):
        time.sleep(seconds)
        dies(how)


def test_the_status_is_right_after_each_kill(tmp_path, record_property, request):
    draws = random.Random(15)
    right, slowest = 0, 0.0
    for number in range(100 if request.config.getoption("--full") else 20):
        how = list(KILLS)[number % len(KILLS)]
        folder = tmp_path / f"{number}-{how}"
        folder.mkdir()
        seconds = draws.random() / 100
        child = in_child(lambda how=how, folder=folder, seconds=seconds: run_and_die(str(folder), how, seconds))
        if number % 2:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has asked how it ended
        else:
            os.waitpid(child, 0)
        began = time.monotonic()
        found = read_status(str(folder))
        slowest = max(slowest, time.monotonic() - began)
        if number % 2:
            os.waitpid(child, 0)
        status, cause = KILLS[how]
        assert (status, cause) == (found.status, found.cause and found.cause["message"]), how
        assert [STATUS_FILE] == [name for name in os.listdir(folder) if not name.startswith(".")]
        right += 1
    record_property("kills_right", right)
    record_property("slowest_seconds", slowest)
    assert slowest < 30


def test_a_run_that_goes_on_is_running_and_its_beats_are_counted(tmp_path):
    with Heartbeat(str(tmp_path), started=time.time(), beat_seconds=0.001):
        first = read_status(str(tmp_path))
        deadline = time.monotonic() + 20
        while (later := read_status(str(tmp_path))).beat == first.beat and time.monotonic() < deadline:
            time.sleep(0.005)
    assert [Status.RUNNING, Status.RUNNING] == [first.status, later.status]
    assert later.beat > first.beat
    assert Status.FINISHED is read_status(str(tmp_path)).status


HERE = of_this_process(1000.0)
FRESH = HERE.updated + STALE_SECONDS - 1
STALE = HERE.updated + STALE_SECONDS + 1


@pytest.mark.parametrize(
    ("changes", "now", "expected"),
    [
        ({}, STALE, Status.RUNNING),  # a step may take longer than any heartbeat; the process is there
        ({"process_started": HERE.process_started - 1}, FRESH, Status.KILLED),  # another process has its number now
        ({"pid": 2**30}, FRESH, Status.KILLED),
        ({"boot_id": "of another boot"}, STALE, Status.KILLED),
        ({"boot_id": "of another machine of this name"}, FRESH, Status.RUNNING),
        ({"hostname": "elsewhere", "pid": 2**30}, FRESH, Status.RUNNING),
        ({"hostname": "elsewhere"}, STALE, Status.KILLED),
        ({"hostname": "elsewhere"}, HERE.updated - 9999, Status.RUNNING),  # our clock is behind the writer's
        ({"pid_namespace": "pid:[1]", "pid": 2**30}, FRESH, Status.RUNNING),  # a container of this machine
        ({"pid_namespace": "pid:[1]"}, STALE, Status.KILLED),
        ({"status": Status.PAUSED, "pid": 2**30}, FRESH, Status.KILLED),
        ({"status": Status.PAUSED}, STALE, Status.PAUSED),
        ({"status": Status.FINISHED, "pid": 2**30}, STALE, Status.FINISHED),
    ],
)
def test_the_status_follows_from_the_process_or_elsewhere_from_the_age_of_the_heartbeat(
    tmp_path, changes, now, expected
):
    write_status(str(tmp_path), dataclasses.replace(HERE, **changes))
    assert expected is read_status(str(tmp_path), now=now).status


SOUND = {"form": 1, **dataclasses.asdict(HERE)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not JSON"),
        (b'{"form": 1, "status": "runn', "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it has no form number"),
        (b"{}", "it has no form number"),
        (json.dumps(SOUND | {"form": 2}).encode(), "it has form 2, and this version reads form 1"),
        *(
            (json.dumps(SOUND | {name: value}).encode(), f"{name!r} is {value!r}")
            for name, value in [
                ("status", "asleep"), ("status", None), ("status", []), ("pid", -1), ("pid", True), ("pid", "7"),
                ("beat", 1.5), ("step", "3"), ("max_steps", -1), ("hostname", None), ("updated", float("inf")),
                ("started", float("nan")), ("cause", "lost"), ("cause", {"code": 1}), ("control", 5), ("boot_id", 1),
            ]
        ),
    ],
)  # fmt: skip
def test_a_damaged_or_newer_file_gives_no_status_and_one_reason(tmp_path, content, why):
    (tmp_path / STATUS_FILE).write_bytes(content)
    assert read_status(str(tmp_path)) is None
    with pytest.raises(StatusError) as caught:
        load_status(str(tmp_path))
    assert why == str(caught.value)


def test_a_file_of_an_older_writer_without_optional_keys_is_read(tmp_path):
    needed = {name: value for name, value in SOUND.items() if name not in ("pid_namespace", "control", "cause")}
    (tmp_path / STATUS_FILE).write_text(json.dumps(needed | {"of_the_future": 1}))
    assert 1000.0 == load_status(str(tmp_path)).started


def test_a_pipe_in_place_of_the_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / STATUS_FILE)
    assert read_status(str(tmp_path)) is None


class Progress:
    def __init__(self, step, most):
        self.state = type("State", (), {"global_step": step, "max_steps": most})()


class Broken:
    @property
    def state(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (Progress(7, 10), (7, 10)),
        (Progress(0, -1), (None, None)),
        (Progress("7", None), (None, None)),
        (Broken(), (None, None)),
        (print, (None, None)),
    ],
)
def test_progress_is_read_from_the_state_of_any_main(tmp_path, main, expected):
    with Heartbeat(str(tmp_path), started=1.0) as beat:
        beat.watch(main)
    found = load_status(str(tmp_path))
    assert expected == (found.step, found.max_steps)


def test_a_pause_and_a_control_socket_are_written_at_once(tmp_path):
    assert current_heartbeat() is None
    with Heartbeat(str(tmp_path), started=1.0):
        current_heartbeat().update(status=Status.PAUSED, control="/tmp/x.sock")
        paused = read_status(str(tmp_path))
        current_heartbeat().update(status=Status.RUNNING)
    assert (Status.PAUSED, "/tmp/x.sock") == (paused.status, paused.control)
    assert (Status.FINISHED, None) == (load_status(str(tmp_path)).status, load_status(str(tmp_path)).control)
    assert current_heartbeat() is None


def test_a_failure_is_recorded_without_secrets_on_one_line(tmp_path):
    with pytest.raises(ValueError, match="first"), Heartbeat(str(tmp_path), started=1.0, rank=0):
        raise ValueError("first line\nsecond api_key=hunter2secret " + "x" * 2000)
    cause = load_status(str(tmp_path)).cause
    assert (None, 0) == (cause["code"], cause["rank"])
    assert cause["message"].startswith("ValueError: first line second api_key=")
    assert "hunter2secret" not in cause["message"]
    assert len(cause["message"]) < 600


def test_the_cause_of_another_rank_stays_whatever_the_main_process_writes_later(tmp_path):
    with pytest.raises(RuntimeError), Heartbeat(str(tmp_path), started=1.0, rank=0, beat_seconds=0.001):
        record_cause(str(tmp_path), message="ValueError: bad row", code=None, rank=1)
        time.sleep(0.02)
        raise RuntimeError("Connection closed by peer")
    found = load_status(str(tmp_path))
    assert (Status.FAILED, "ValueError: bad row", 1) == (found.status, found.cause["message"], found.cause["rank"])


def test_a_cause_that_arrives_after_the_end_replaces_the_lost_connection(tmp_path):
    with pytest.raises(RuntimeError), Heartbeat(str(tmp_path), started=1.0, rank=0):
        raise RuntimeError("Connection closed by peer")
    record_cause(str(tmp_path), message="ValueError: bad row", code=None, rank=1)
    assert "ValueError: bad row" == load_status(str(tmp_path)).cause["message"]


def test_a_main_process_that_died_without_a_word_is_killed_and_the_cause_is_kept(tmp_path):
    write_status(str(tmp_path), dataclasses.replace(HERE, pid=2**30))
    record_cause(str(tmp_path), message="rank 0 was ended by SIGKILL", code="FG710", rank=0)
    found = read_status(str(tmp_path))
    assert (Status.KILLED, "FG710") == (found.status, found.cause["code"])


def test_a_cause_without_a_status_makes_no_file(tmp_path):
    record_cause(str(tmp_path), message="x", code=None, rank=1)
    record_cause(str(tmp_path / "gone"), message="x", code=None, rank=1)
    assert [] == os.listdir(tmp_path)


def test_a_forked_process_writes_nothing_and_its_parent_goes_on(tmp_path):
    with Heartbeat(str(tmp_path), started=1.0, beat_seconds=0.001):

        def child():
            os._exit(7 if current_heartbeat() is None else 8)

        before = load_status(str(tmp_path)).pid
        _, status = os.waitpid(in_child(child), 0)
        beats = load_status(str(tmp_path)).beat
        deadline = time.monotonic() + 20
        while load_status(str(tmp_path)).beat == beats and time.monotonic() < deadline:
            time.sleep(0.005)
        assert beats < load_status(str(tmp_path)).beat
    assert (7, os.getpid()) == (os.waitstatus_to_exitcode(status), before)


def test_a_body_that_a_forked_process_leaves_is_not_the_end_of_the_run(tmp_path):
    reading, writing = os.pipe()
    with Heartbeat(str(tmp_path), started=1.0):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert Status.RUNNING is read_status(str(tmp_path)).status
    if child == 0:
        os.write(writing, b"left")
        os._exit(0)
    assert b"left" == os.read(reading, 4)
    assert Status.FINISHED is read_status(str(tmp_path)).status
    os.close(reading)
    os.close(writing)


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Heartbeat(str(folder), started=1.0, beat_seconds=0.001):
        os.remove(folder / STATUS_FILE)
        for name in os.listdir(folder):
            os.remove(folder / name)
        deadline = time.monotonic() + 20
        while folder.exists() and time.monotonic() < deadline:
            with folder_lock(str(folder)):
                for name in os.listdir(folder):
                    os.remove(folder / name)
                folder.rmdir()
    assert not folder.exists()


def test_a_disk_that_cannot_be_written_ends_no_run_and_is_said_once(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.write_text("a file in place of the folder")
    with Heartbeat(str(folder), started=1.0, beat_seconds=0.001):
        time.sleep(0.02)
    assert ["cannot be written" in record.message for record in caplog.records] == [True]


def test_on_a_full_disk_the_end_is_written_into_the_blocks_of_the_old_file(tmp_path, monkeypatch):
    write_status(str(tmp_path), dataclasses.replace(HERE, control="/a/socket/with/a/long/name"))

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    write_status(str(tmp_path), dataclasses.replace(HERE, status=Status.FINISHED))
    assert Status.FINISHED is load_status(str(tmp_path)).status


def test_two_processes_that_write_at_once_leave_one_whole_file(tmp_path):
    write_status(str(tmp_path), HERE)

    def count():
        for _ in range(50):
            time.sleep(0.002)  # nobody writes without a pause
            run_status.change_status(str(tmp_path), lambda found: dataclasses.replace(found, beat=found.beat + 1))

    children = [in_child(count) for _ in range(3)]
    for child in children:
        os.waitpid(child, 0)
    assert 150 == load_status(str(tmp_path)).beat
    assert [STATUS_FILE] == os.listdir(tmp_path)


def test_every_field_of_a_status_survives_the_file(tmp_path):
    every = RunStatus(
        status=Status.FAILED, pid=3, process_started=4, boot_id="b", hostname="h", pid_namespace="n", beat=5, started=6.5,
        updated=7.5, step=8, max_steps=9, cause={"code": "FG800", "message": "m", "rank": 1}, control="file",
    )  # fmt: skip
    write_status(str(tmp_path), every)
    assert every == load_status(str(tmp_path))


def test_a_process_that_the_system_hides_from_other_users_is_judged_by_its_heartbeat(monkeypatch):
    ended = os.fork() or os._exit(0)
    os.waitpid(ended, 0)
    now = time.time()
    # A process that this user cannot see looks like one that is gone, except to a signal.
    run = dataclasses.replace(of_this_process(now), pid=ended, updated=now)
    assert Status.KILLED is run.concluded(now).status

    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert Status.RUNNING is run.concluded(now).status
    assert Status.KILLED is run.concluded(now + 60).status
