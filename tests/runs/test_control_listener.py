"""The thread that takes requests: who may ask, what is refused, and that nobody can make the run wait."""

import json
import os
import socket
import stat
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from forgather.control_listener import ControlListener
from forgather.run_control import Action, Answer, Request, encode_request, noted_status
from tests.patience import patience
from tests.runs.hostile_requests import HOSTILE

PAUSE = encode_request(Request(action=Action.PAUSE))


@contextmanager
def listening(folder):
    listener = ControlListener(str(folder))
    try:
        yield listener
    finally:
        for arrival in listener.take():
            arrival.answer(Answer(step=1, done="late"))
        listener.close()


@pytest.fixture
def listener(tmp_path):
    with listening(tmp_path) as one:
        yield one


def connect(folder):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(patience(20))
    client.connect(noted_status(str(folder)).control)
    return client


def reply(client):
    received = b""
    while part := client.recv(1 << 16):
        received += part
    return json.loads(received)


def until(condition):
    deadline = time.monotonic() + patience(20)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def asked(folder, message):
    with connect(folder) as client:
        try:
            client.sendall(message)
            client.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was read
        try:
            return reply(client)
        except ConnectionResetError:
            return None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused_with_a_code(name, listener, tmp_path):
    answer = asked(tmp_path, HOSTILE[name])
    # A connection that is reset has written more than is ever read.
    if answer is not None:
        assert answer["error"]["code"] in ("FG512", "FG513", "FG517")
    assert not listener.waiting


def test_a_request_is_taken_and_answered(listener, tmp_path):
    with connect(tmp_path) as client:
        client.sendall(PAUSE)
        until(lambda: listener.waiting)
        (arrival,) = listener.take()
        assert Action.PAUSE is arrival.request.action
        arrival.answer(Answer(step=3, done="paused"))
        answer = reply(client)
        assert (3, "paused", None) == (answer["step"], answer["done"], answer["error"])


def test_only_this_user_reaches_the_socket(listener, tmp_path):
    path = Path(noted_status(str(tmp_path)).control)
    modes = [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)]
    assert [0o600, 0o700] == modes
    assert len(os.fsencode(path)) <= 107


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_socket_is_open_to_all(listener, tmp_path):
    path = Path(noted_status(str(tmp_path)).control)
    path.parent.chmod(0o755)
    path.chmod(0o666)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                os.write(writing, json.dumps(reply(client)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    answer = json.loads(os.read(reading, 4096))
    os.close(reading)
    assert "FG517" == answer["error"]["code"]
    assert "another user" in answer["error"]["message"]


def test_slow_silent_and_deaf_clients_delay_nobody(listener, tmp_path):
    silent = [connect(tmp_path) for _ in range(10)]
    slow = connect(tmp_path)
    slow.sendall(PAUSE[:5])
    deaf = connect(tmp_path)
    deaf.sendall(PAUSE)
    with connect(tmp_path) as client:
        client.sendall(PAUSE)
        until(lambda: len(listener._queue) == 2)
        for arrival in listener.take():
            arrival.answer(Answer(step=1, done="x" * 10_000))
        assert reply(client)["error"] is None
    for one in (*silent, slow, deaf):
        one.close()


def test_more_clients_than_places_are_refused_and_the_others_are_served(listener, tmp_path):
    crowd = [connect(tmp_path) for _ in range(16)]
    with connect(tmp_path) as client:
        assert "FG517" == reply(client)["error"]["code"]
    for one in crowd:
        one.close()
    until(lambda: not listener._clients)
    with connect(tmp_path) as client:
        client.sendall(PAUSE)
        until(lambda: listener.waiting)


def test_a_request_whose_client_has_died_is_still_done(listener, tmp_path):
    client = connect(tmp_path)
    client.sendall(PAUSE)
    client.close()
    until(lambda: listener.waiting)
    (arrival,) = listener.take()
    arrival.answer(Answer(step=1, done="paused"))


def test_two_clients_are_answered_in_the_order_of_their_requests(listener, tmp_path):
    with connect(tmp_path) as first, connect(tmp_path) as second:
        first.sendall(PAUSE)
        until(lambda: listener.waiting)
        second.sendall(encode_request(Request(action=Action.RESUME)))
        until(lambda: len(listener._queue) == 2)
        arrivals = listener.take()
        assert [Action.PAUSE, Action.RESUME] == [one.request.action for one in arrivals]
        for number, one in enumerate(arrivals):
            one.answer(Answer(step=number, done="done"))
        assert [0, 1] == [reply(client)["step"] for client in (first, second)]


def test_the_end_leaves_no_socket_no_note_and_no_thread(tmp_path):
    with listening(tmp_path):
        path = Path(noted_status(str(tmp_path)).control)
        assert path.is_socket()
    assert not path.parent.exists()
    assert [] == list(tmp_path.iterdir())
    assert "forgather-control" not in [thread.name for thread in threading.enumerate()]


def test_a_socket_path_that_is_too_long_gives_another_folder(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with listening(tmp_path):
        assert noted_status(str(tmp_path)).control.startswith("/tmp/forgather-")
    assert [] == list(deep.iterdir())


def test_without_sockets_requests_come_by_files(tmp_path, monkeypatch):
    monkeypatch.delattr("socket.SO_PEERCRED")
    with listening(tmp_path):
        assert "file" == noted_status(str(tmp_path)).control


def put(folder, content=PAUSE, *, name="0" * 32, mode=0o700):
    place = folder / "control"
    place.mkdir(mode, exist_ok=True)
    place.chmod(mode)
    file = place / f"request-{name}.json"
    file.write_bytes(content)
    return file


def test_a_request_by_file_is_taken_once_and_answered(listener, tmp_path):
    file = put(tmp_path)
    until(lambda: listener.waiting)
    assert not file.exists()
    (arrival,) = listener.take()
    arrival.answer(Answer(step=2, done="paused"))
    answer = file.with_name(f"answer-{'0' * 32}.json")
    assert "paused" == json.loads(answer.read_bytes())["done"]
    assert 0o600 == stat.S_IMODE(answer.stat().st_mode)


def _link(folder):
    file = put(folder)
    secret = folder / "secret"
    secret.write_bytes(PAUSE)
    file.unlink()
    file.symlink_to(secret)


def _pipe(folder):
    file = put(folder)
    file.unlink()
    os.mkfifo(file)


def _other_owner(folder):
    os.chown(put(folder), 65534, -1)


def _other_folder(folder):
    os.chown(put(folder).parent, 65534, -1)


def _linked_folder(folder):
    place = put(folder).parent
    place.rename(folder / "elsewhere")
    place.symlink_to(folder / "elsewhere")


BAD_FILES = {
    "a link": _link,
    "a pipe": _pipe,
    "a folder": lambda folder: put(folder).with_name(f"request-{'1' * 32}.json").mkdir() or put(folder).unlink(),
    "a file of another user": _other_owner,
    "a file that others may write": lambda folder: put(folder).chmod(0o666),
    "a folder of another user": _other_folder,
    "a folder that others may write": lambda folder: put(folder, mode=0o777),
    "a folder that is a link": _linked_folder,
    "another name": lambda folder: put(folder).rename(folder / "control" / "request-x.json"),
    "too much": lambda folder: put(folder, PAUSE + b" " * (1 << 17)),
    **{name: lambda folder, name=name: put(folder, HOSTILE[name]) for name in ("no JSON", "a rate of 0")},
}


def test_hostile_request_files_are_refused(tmp_path):
    names = [name for name in BAD_FILES if os.getuid() == 0 or "another user" not in name]
    with listening(tmp_path) as listener:
        listener.take()
        for name in names:
            folder = tmp_path / name
            folder.mkdir()
            BAD_FILES[name](folder)
            listener._run_dir = str(folder)
            listener._do(lambda: None)
            # The thread looks for files each time it wakes; the second round shows that the first one has ended.
            passed = threading.Event()
            listener._do(lambda: None)
            time.sleep(0.02)
            listener._do(passed.set)
            assert passed.wait(patience(10))
            assert not listener.waiting, name
        listener._run_dir = str(tmp_path)


def test_a_forked_process_that_ends_leaves_the_parent_listening(listener, tmp_path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with connect(tmp_path) as client:
        client.sendall(PAUSE)
        until(lambda: listener.waiting)
