"""What a piece of work costs: a process that holds nothing else forks for it, and the system counts.

The process of the tests would not do: it may have loaded torch and started threads, which a fork inherits. Work is a
function of a module with its arguments (both can be pickled); it finds the folder and the environment of the test.
"""

from __future__ import annotations

import functools
import os
import pickle
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tests.patience import slowness

MAX_CPU_SECONDS = 2.0
MAX_BYTES = 512 << 20
_HARD_BYTES = 4 << 30
_HARD_SECONDS = 60
_ROOT = Path(__file__).parents[1]


class Cost(NamedTuple):
    """What came of the work, and what it took: of the processor, and of memory at its peak."""

    result: Any
    cpu_seconds: float
    peak_bytes: int

    @property
    def is_small(self) -> bool:
        """Whether it keeps to what a refusal may cost, on a machine as fast as this one is now."""
        return self.cpu_seconds <= MAX_CPU_SECONDS * slowness() and self.peak_bytes <= MAX_BYTES


def measured(work: Callable[..., object], *arguments: object) -> Cost:
    """Returns what `work` returns (anything that can be pickled) with its cost."""
    server = _server()
    request = pickle.dumps((work, arguments))
    try:
        pickle.dump((os.getcwd(), dict(os.environ), request), server.stdin)
        server.stdin.flush()
        cost, failure = pickle.load(server.stdout)
    except BaseException:
        # A test that is stopped leaves its answer to the next one.
        server.kill()
        _server.cache_clear()
        raise
    assert cost is not None, failure
    return cost


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """Starts the process that forks; it ends when its input does, with the process of the tests."""
    words = [sys.executable, "-c", "from tests.measured import serve; serve()"]
    return subprocess.Popen(words, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def serve() -> None:
    """Answers each request with `(cost, None)` or `(None, failure)`."""
    # What the work prints goes to the standard error: the standard output carries the answers.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    while True:
        try:
            folder, environment, request = pickle.load(requests)
        except EOFError:
            return
        # Here, not in the child: the modules are imported once.
        work, arguments = pickle.loads(request)
        pickle.dump(_forked(folder, environment, functools.partial(work, *arguments)), answers)
        answers.flush()


def _forked(folder: str, environment: dict[str, str], work: Callable[[], object]) -> tuple[Cost | None, str | None]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "wb") as stream:
            os._exit(_work(folder, environment, work, stream))
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        content = stream.read()
    _, status, usage = os.wait4(child, 0)
    if status:
        return None, content.decode() or f"the limits of the child ended it: status {status}"
    return Cost(pickle.loads(content), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024), None


def _work(folder: str, environment: dict[str, str], work: Callable[[], object], stream: BinaryIO) -> int:
    """Works under hard limits, writes the result or the traceback, and returns the status of the child."""
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_AS, (_HARD_BYTES, _HARD_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_HARD_SECONDS, _HARD_SECONDS))
        stream.write(pickle.dumps(work()))
        status = 0
    except BaseException:  # noqa: BLE001 - the test shows it
        stream.write(traceback.format_exc().encode())
        status = 1
    stream.flush()
    return status
