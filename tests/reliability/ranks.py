"""The real command in forked ranks: everything is imported already, so that two of them are up in half a second.

Takes the words of a command line; gives what each rank ended with, and what they printed. Keeps true: each rank is what
a launcher that sets environment variables and does nothing else would have started; none of them outlives the call.
"""

import atexit
import multiprocessing
import os
import re
import sys
import time
from dataclasses import dataclass

import torch

from forgather.cli.main import main
from tests.ml.distributed.gang import free_port, import_what_ranks_import
from tests.patience import patience

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        statuses: exit status of each rank; minus the number of a signal that killed it.
        printed: by all ranks, on both streams.
        moments: instants that a rank printed behind "at ", first ones first.
        end: when the last rank had ended.
    """

    statuses: list[int]
    printed: str
    moments: list[float]
    end: float


def run_command(words, cwd, *, ranks=2, timeout=60.0):
    """Runs `fgcli` with these words in so many ranks (1: in one process that nobody launched)."""
    import_what_ranks_import()
    output = cwd / "printed.txt"
    output.write_bytes(b"")
    port = free_port()
    children = [_fork.Process(target=_work, args=(rank, ranks, port, words, cwd, output)) for rank in range(ranks)]
    for child in children:
        child.start()
    timeout = patience(timeout)
    deadline = time.monotonic() + timeout
    try:
        # Asking takes note of those that have ended, as a launcher does: until then they are there for the others.
        while any([child.is_alive() for child in children]) and time.monotonic() < deadline:
            time.sleep(0.02)
        end = time.time()
        printed = output.read_text(errors="replace")
        stuck = [rank for rank, child in enumerate(children) if child.is_alive()]
        assert [] == stuck, f"ranks {stuck} did not end within {timeout:g} s\n{printed}"
        moments = [float(found) for found in re.findall(r"\bat (\d+\.\d+)", printed)]
        return Ended([child.exitcode for child in children], printed, moments, end)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()


def _work(rank, ranks, port, words, cwd, output):
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(cwd)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    torch.set_num_threads(1)
    # What the test session has registered is not for this process to do.
    atexit._clear()
    status = main(words)
    atexit._run_exitfuncs()
    os._exit(status)
