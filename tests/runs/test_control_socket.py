"""Sockets of killed runs: the next run and `fgcli runs` remove them, and nothing else."""

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.control_listener import ControlListener
from forgather.control_socket import make_socket_folder, remove_dead_sockets
from forgather.run_control import noted_status
from tests.runs.test_control_listener import listening


@pytest.fixture
def sockets(monkeypatch):
    # The path of a socket ends at 107 bytes, and that of a test may be longer.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def age(path):
    os.utime(path, (time.time() - 100, time.time() - 100), follow_symlinks=False)


def killed_run(folder):
    """Returns the socket that a process has left behind which was killed while it listened."""
    child = os.fork()
    if child == 0:
        ControlListener(str(folder))
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    path = Path(noted_status(str(folder)).control)
    age(path)
    return path


@pytest.mark.parametrize("who", ["the next run", "fgcli runs"])
def test_the_socket_of_a_killed_run_is_removed(sockets, tmp_path, who):
    folder = tmp_path / "killed"
    folder.mkdir()
    path = killed_run(folder)
    assert path.is_socket() and path.parent.parent == sockets
    if who == "fgcli runs":
        assert 0 == main(["runs", str(tmp_path)])
    else:
        with listening(tmp_path):
            assert not path.parent.exists()
    assert [] == list(sockets.iterdir())


def test_what_may_be_of_a_live_run_or_of_others_stays(sockets, tmp_path):
    with listening(tmp_path):
        age(noted_status(str(tmp_path)).control)
        live = next(sockets.iterdir())
        young, open_to_all, other, full = (Path(make_socket_folder(str(sockets))) for _ in range(4))
        outside = tmp_path / "outside"
        outside.mkdir(mode=0o700)
        for folder in (young, open_to_all, outside):
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(folder / "control.sock"))
        age(open_to_all / "control.sock")
        age(outside / "control.sock")
        open_to_all.chmod(0o755)
        (other / "control.sock").write_text("no socket")
        age(other / "control.sock")
        (sockets / f"{live.name}x").symlink_to(outside)
        (sockets / "another-program").mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
            server.bind(str(full / "control.sock"))
            server.listen(0)
            first.connect(str(full / "control.sock"))
            age(full / "control.sock")
            before = sorted([*sockets.rglob("*"), *outside.iterdir()])
            remove_dead_sockets()
            assert before == sorted([*sockets.rglob("*"), *outside.iterdir()])
