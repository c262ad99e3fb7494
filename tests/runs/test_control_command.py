"""`fgcli control`: what it sends, prints and returns, and what it says of a run that cannot be controlled."""

import errno
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import pytest

from forgather.cli.main import main
from forgather.control_listener import ControlListener
from forgather.errors import ControlError
from forgather.launch import control_client
from forgather.run_control import BY_FILE, NOTE, Action, Answer, note_pause, noted_status, refusal
from forgather.run_status import of_this_process, write_status
from tests.runs.corpus import make_run

REFUSED = ControlError("eval_steps has no effect: eval_strategy is 'no'", code="FG516", hint="set it in the config")


@contextmanager
def going_on(folder, answer):
    """A run in this process that answers each request; `answer` returns None to leave one without."""
    listener, ends = ControlListener(str(folder)), threading.Event()

    def steps():
        while not ends.is_set():
            listener.wait(0.01)
            for arrival in listener.take():
                given = answer(arrival.request)
                if given is not None:
                    arrival.answer(given)

    loop = threading.Thread(target=steps)
    loop.start()
    try:
        yield listener
    finally:
        ends.set()
        loop.join()
        listener.close()


def done(request):
    return Answer(step=7, done=f"{request.action}d {dict(request.settings)}", facts={"who": request.who})


def write_note(folder, **changes):
    content = asdict(replace(of_this_process(0.0), **changes))
    (folder / NOTE).write_text(json.dumps(content))


def dead_process():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def record(folder):
    for name in ("run.json", "graph.yaml"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize("action", [action for action in Action if action is not Action.SET])
def test_the_answer_is_printed_with_its_step(action, tmp_path, capsys):
    with going_on(tmp_path, done):
        assert 0 == main(["control", str(tmp_path), action])
    assert f"step 7: {action}d {{}}\n" == capsys.readouterr().out


def test_a_run_can_be_named_as_for_other_commands(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "out", 0)
    # Without a heartbeat, the process of this test is noted as that of the run.
    run = make_run(tmp_path / "out", 1, status=None)
    monkeypatch.chdir(tmp_path)
    with going_on(run, done):
        for word in ("last", run.name[:15], os.path.relpath(run)):
            assert 0 == main(["control", word, "pause"])
            assert "step 7: paused" in capsys.readouterr().out
    assert 1 == main(["control", "nothing", "pause"])
    assert "error[FG500]: there is no run 'nothing' below '.'" in capsys.readouterr().err


def test_settings_are_sent_as_numbers(tmp_path, capsys):
    with going_on(tmp_path, done):
        assert 0 == main(["control", str(tmp_path), "set", "learning_rate=1e-4", "save_steps=50", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ("set", 7) == (found["action"], found["step"])
    assert "{'learning_rate': 0.0001, 'save_steps': 50}" in found["done"]


@pytest.mark.parametrize("is_full", [True, False])
def test_a_request_that_cannot_be_written_is_refused_and_leaves_nothing(is_full, tmp_path, capsys, monkeypatch):
    write_note(tmp_path, control=BY_FILE)
    if is_full:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(full))
    else:
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        monkeypatch.setattr(os, "mkdir", lambda *_: (_ for _ in ()).throw(denied))
    assert 1 == main(["control", str(tmp_path), "save"])
    assert "error[FG515]: the request cannot be written into" in capsys.readouterr().err
    assert [NOTE] == os.listdir(tmp_path)


def test_a_client_that_ends_meanwhile_takes_no_folder_from_another_one(tmp_path, monkeypatch):
    lstat, gone = os.lstat, []

    def removed_once(path):
        if not gone and path == str(tmp_path / "control"):
            gone.append(path)
            os.rmdir(path)
        return lstat(path)

    write_note(tmp_path, control=BY_FILE)
    monkeypatch.setattr(os, "lstat", removed_once)
    assert 1 == main(["control", str(tmp_path), "save", "--timeout", "0.1"])
    assert [str(tmp_path / "control")] == gone


@pytest.mark.parametrize("wrong", [{"pid": "x"}, {"updated": 10**400}, {"status": []}, {"step": -1}, {"control": 5}])
def test_a_damaged_note_of_an_address_is_no_run(wrong, tmp_path, capsys):
    record(tmp_path)
    (tmp_path / NOTE).write_text(json.dumps(asdict(of_this_process(0.0)) | wrong))
    assert 1 == main(["control", str(tmp_path), "save"])
    assert "error[FG510]" in capsys.readouterr().err


def test_a_refusal_is_an_error_with_its_step_and_hint(tmp_path, capsys):
    with going_on(tmp_path, lambda request: refusal(REFUSED, 12)):
        assert 1 == main(["control", str(tmp_path), "set", "eval_steps=5"])
    printed = capsys.readouterr().err
    assert "error[FG516]: step 12: eval_steps has no effect" in printed
    assert "help: set it in the config" in printed


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["set", "learning_rte=1"], "FG512", "did you mean 'learning_rate'?"),
        (["set", "seed=1"], "FG512", "one of: eval_steps, learning_rate, logging_steps, save_steps"),
        (["set"], "FG512", "'set' needs NAME=VALUE"),
        (["pause", "learning_rate=1"], "FG512", "only 'set' takes NAME=VALUE"),
        (["set", "learning_rate"], "FG513", "must be a number above 0"),
        (["set", "learning_rate=-1e-4"], "FG513", "must be a number above 0"),
        (["set", "learning_rate=nan"], "FG513", "'nan'"),
        (["set", "learning_rate=1,000"], "FG513", "'1,000'"),
        (["set", "learning_rate=1e999"], "FG513", "must be a number above 0"),
        (["set", "save_steps=2.5"], "FG513", "a whole number from 1"),
        (["set", "save_steps=2", "save_steps=3"], "FG513", "is set twice"),
    ],
)
def test_a_setting_that_is_not_one_is_refused_before_anything_is_sent(words, code, said, tmp_path, capsys):
    asked = []
    with going_on(tmp_path, lambda request: asked.append(request)):
        assert 1 == main(["control", str(tmp_path), *words])
    printed = capsys.readouterr().err
    assert f"error[{code}]" in printed
    assert said in printed
    assert [] == asked


def test_an_unknown_action_is_wrong_usage_with_the_nearest_one(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["control", str(tmp_path), "puase"])
    assert "did you mean 'pause'?" in capsys.readouterr().err


def test_a_run_on_another_machine_is_asked_by_file(tmp_path, capsys):
    with going_on(tmp_path, done) as listener:
        write_note(tmp_path, control="/tmp/socket/of/another/machine", hostname="elsewhere")
        assert 0 == main(["control", str(tmp_path), "save", "--timeout", "30"])
        assert not os.path.exists(tmp_path / "control"), "nothing is left"
        assert not listener.waiting
    assert "step 7: saved" in capsys.readouterr().out


def test_a_request_is_written_although_another_client_removes_the_folder_at_that_moment(tmp_path, capsys, monkeypatch):
    mkdir, made = os.mkdir, []

    def made_and_removed(path, mode=0o777):
        mkdir(path, mode)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)

    with going_on(tmp_path, done):
        write_note(tmp_path, control="file")
        monkeypatch.setattr(os, "mkdir", made_and_removed)
        assert 0 == main(["control", str(tmp_path), "save", "--timeout", "30"])
    assert 2 == len(made)


def test_a_disk_without_room_for_a_request_is_named(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with going_on(tmp_path, done):
        write_note(tmp_path, control="file")
        monkeypatch.setattr(os, "rename", full)
        assert 1 == main(["control", str(tmp_path), "save", "--timeout", "30"])
    assert "error[FG515]: the request cannot be written into" in (printed := capsys.readouterr().err)
    assert "No space left on device" in printed
    assert not (tmp_path / "control").exists()


@pytest.mark.parametrize(
    "answer",
    [b"\n", b"[]\n", b'{"step": 1}\n', b'{"step": "1", "done": "", "facts": {}, "error": null}\n', b"[" * 99_999 + b"\n",
     b'{"step": 1, "done": "", "facts": [1], "error": null}\n', b'{"step": 1, "done": "", "facts": {}, "error": "no"}\n',
     b'{"step": 1, "done": "", "facts": {}, "error": {"message": "no", "hint": 5}}\n', b"x" * (1 << 21)],
    ids=range(9),
)  # fmt: skip
def test_a_strange_answer_is_refused_and_ends(answer, tmp_path, capsys):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/s")
        server.listen()

        def speak():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(answer)
                connection.recv(1 << 16)

        talker = threading.Thread(target=speak)
        talker.start()
        write_note(tmp_path, control=f"{folder}/s")
        assert 1 == main(["control", str(tmp_path), "save"])
        talker.join()
    assert "error[FG517]: the answer of the run is malformed" in capsys.readouterr().err


def test_no_answer_in_time_says_what_becomes_of_the_request(tmp_path, capsys):
    with going_on(tmp_path, lambda request: None):
        assert 1 == main(["control", str(tmp_path), "save", "--timeout", "0.3"])
    assert "error[FG514]" in (printed := capsys.readouterr().err)
    assert "will do it at the end of the step" in printed


def test_a_file_that_was_not_read_in_time_is_withdrawn(tmp_path, capsys):
    write_note(tmp_path, control=BY_FILE)
    assert 1 == main(["control", str(tmp_path), "save", "--timeout", "0.3"])
    assert "is withdrawn" in capsys.readouterr().err
    assert [NOTE] == os.listdir(tmp_path)


def test_a_run_that_ends_meanwhile_is_said_to_have_ended(tmp_path, capsys):
    ending = threading.Timer(0.2, lambda: listener.close())
    listener = ControlListener(str(tmp_path))
    ending.start()
    assert 1 == main(["control", str(tmp_path), "save"])
    ending.join()
    assert "error[FG515]" in capsys.readouterr().err


def test_a_run_that_is_killed_while_a_file_waits_is_said_to_be_killed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(control_client, "_STATUS_SECONDS", 0.1)
    write_note(tmp_path, control=BY_FILE)
    dying = threading.Timer(0.3, lambda: write_note(tmp_path, control=BY_FILE, pid=dead_process()))
    dying.start()
    assert 1 == main(["control", str(tmp_path), "save"])
    dying.join()
    assert "error[FG515]: the run was killed before it answered" in capsys.readouterr().err
    assert [NOTE] == os.listdir(tmp_path)


@pytest.mark.parametrize("beats", [True, False])
def test_a_run_of_a_machine_whose_clock_is_behind_is_asked_while_its_heart_beats(tmp_path, capsys, monkeypatch, beats):
    monkeypatch.setattr(control_client, "_BEAT_SEEN_SECONDS", 0.3)
    behind = replace(of_this_process(0.0), hostname="elsewhere", updated=time.time() - 3600, control="file")
    with going_on(tmp_path, done):
        write_status(str(tmp_path), replace(behind, beat=7))
        later = threading.Timer(0.1, write_status, (str(tmp_path), replace(behind, beat=8)))
        if beats:
            later.start()
        assert int(not beats) == main(["control", str(tmp_path), "save", "--timeout", "30"])
    printed = capsys.readouterr()
    assert ("step 7: saved" in printed.out) is beats
    assert ("was killed" in printed.err) is not beats


def test_a_killed_run_is_said_to_be_killed(tmp_path, capsys):
    write_note(tmp_path, control="/nowhere", pid=dead_process())
    assert 1 == main(["control", str(tmp_path), "resume"])
    printed = capsys.readouterr().err
    assert "error[FG511]" in printed
    assert "was killed" in printed
    assert "train --resume" in printed


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_a_run_that_has_ended_is_not_asked(status, tmp_path, capsys):
    record(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "places": {}}))
    assert 1 == main(["control", str(tmp_path), "pause"])
    assert "error[FG511]" in (printed := capsys.readouterr().err)
    assert status in printed


def test_a_run_that_takes_no_requests_is_explained(tmp_path, capsys):
    record(tmp_path)
    assert 1 == main(["control", str(tmp_path), "pause"])
    assert "error[FG510]" in (printed := capsys.readouterr().err)
    assert "control: off" in printed


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path, capsys):
    assert 1 == main(["control", str(tmp_path), "pause"])
    assert "error[FG437]" in capsys.readouterr().err


def _listen_as_nobody(path, ready, end):
    """Makes a socket as another user, in a child process, and keeps it until `end` is closed."""
    try:
        os.setuid(65534)
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        os.chmod(path, 0o666)
        os.write(ready, b"x")
        os.read(end, 1)
    finally:
        os._exit(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user_gets_no_request(tmp_path, capsys):
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o777)
        path = f"{open_to_all}/s"
        (waits, ready), (end, ends) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ends)
            _listen_as_nobody(path, ready, end)
        assert b"x" == os.read(waits, 1)
        write_note(tmp_path, control=path)
        assert 1 == main(["control", str(tmp_path), "pause"])
        for one in (waits, ready, end, ends):
            os.close(one)
        os.waitpid(child, 0)
    printed = capsys.readouterr().err
    assert "error[FG517]" in printed
    assert "another user" in printed


def test_a_pause_is_noted_for_readers(tmp_path):
    with going_on(tmp_path, done):
        note_pause(str(tmp_path), is_paused=True)
        assert "paused" == noted_status(str(tmp_path)).status
        assert platform.node() == noted_status(str(tmp_path)).hostname
        note_pause(str(tmp_path), is_paused=False)
        assert "running" == noted_status(str(tmp_path)).status
