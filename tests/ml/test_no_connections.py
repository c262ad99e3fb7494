"""A training opens no connection that nobody asked for, and needs none (S10)."""

import json
import os
import subprocess
import sys

import pytest

from tests.patience import patience
from tests.project.workbench import ROOT, TINY_TRAINING, make_project

# Every process of the run that Python code of it starts by forking writes to the same file.
WATCHED = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")

def is_local(address):
    # A socket of this machine has a path; None is this machine.
    return not isinstance(address, tuple) or str(address[0]).startswith(("127.", "::1", "localhost"))

def hook(event, args):
    if event in EVENTS:
        address = args[1] if event in EVENTS[:3] else (args[0],)
        if address != (None,) and not is_local(address):
            os.write(log, f"{event} {address}\\n".encode())

sys.addaudithook(hook)
from forgather.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
CONFIG = (
    TINY_TRAINING
    + """\
    dataloader_num_workers: 1
    save_strategy: steps
    save_steps: 1
"""
)
CALLER = """\
import socket

def call():
    for act in (lambda one: one.connect(("192.0.2.1", 9)), lambda one: one.sendto(b"", ("192.0.2.1", 9))):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            act(one)
        except OSError:
            pass
    try:
        socket.getaddrinfo("nobody.invalid", 9)
    except OSError:
        pass
    socket.socketpair()[0].close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    files = {
        "templates/configs/train.yaml": CONFIG,
        "templates/configs/calls.yaml": "main: !partial:caller.py:call []\n",
        "caller.py": CALLER,
        "rows.jsonl": "".join(
            json.dumps({"text": f"row {row} of a text that is long enough"}) + "\n" for row in range(12)
        ),
    }
    return make_project(tmp_path_factory.mktemp("offline") / "project", files)


def watched(folder, config):
    """Runs a config without a network, where this system allows that, and returns the connections that it tried."""
    log = folder / f"{config}.log"
    words = [sys.executable, "-c", WATCHED, str(log), "-t", config, "train"]
    # The user is another one in an empty network.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FORGATHER_CACHE": "off", "HF_HOME": str(folder / "hub")}
    environment = {name: value for name, value in environment.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run(
        [*empty_network(), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(240)
    )
    assert 0 == done.returncode, done.stderr
    return sorted({line.split()[0] for line in log.read_text().splitlines()})


def empty_network():
    try:
        done = subprocess.run(["unshare", "-rn", "true"], capture_output=True)
    except OSError:
        return []
    return ["unshare", "-rn"] if 0 == done.returncode else []


@pytest.mark.matrix
def test_a_training_tries_no_connection_and_needs_none(folder):
    assert [] == watched(folder, "train")
    assert (folder / "out/model.safetensors").is_file()


@pytest.mark.matrix
def test_the_watch_sees_a_connection(folder):
    """The control: the same command with code that wants to reach somebody."""
    assert ["socket.connect", "socket.getaddrinfo", "socket.sendto"] == watched(folder, "calls")
