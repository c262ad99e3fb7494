"""Starts ranks by fork from a process that has imported everything: a gang of four is up in a fraction of a second.

Takes a function and a number of ranks; gives what it returned on each rank. Keeps true: an exception of a rank is raised
here with that rank's traceback, the others are ended; a rank that dies or hangs is an error that names it.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from tests.patience import patience

_fork = multiprocessing.get_context("fork")


class RankFailed(AssertionError):
    """A rank raised, died or did not end."""


def run_ranks(world_size, function, *args, timeout=60.0, start_group=False):
    """Returns [function(*args) of rank 0, of rank 1, ...].

    Each rank has the environment variables that torchrun would set (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), one thread, and what it returns must pickle. `start_group` starts a gloo group first, for
    functions that use torch.distributed without a DistributedEnvironment.
    """
    import_what_ranks_import()
    timeout = patience(timeout)
    port = free_port()
    children = []
    for rank in range(world_size):
        here, there = _fork.Pipe(duplex=False)
        child = _fork.Process(target=_work, args=(there, rank, world_size, port, start_group, function, args))
        child.start()
        there.close()
        children.append((child, here))
    try:
        return _collect(children, time.monotonic() + timeout, timeout)
    finally:
        for child, here in children:
            if child.is_alive():
                child.kill()
            child.join()
            here.close()


def _collect(children, deadline, timeout):
    results = {}
    waiting = {here: rank for rank, (_, here) in enumerate(children)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(waiting.values())
            raise RankFailed(f"ranks {missing} did not end within {timeout:g} s")
        for here in ready:
            rank = waiting.pop(here)
            try:
                good, value = pickle.loads(here.recv_bytes())
            except EOFError:
                children[rank][0].join(5)
                raise RankFailed(f"rank {rank} died with exit code {children[rank][0].exitcode}") from None
            if not good:
                raise RankFailed(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(children))]


@functools.cache
def import_what_ranks_import():
    """Imports once, here, what each rank would import for itself."""
    for name in (*_OURS, *_TORCHS):
        importlib.import_module(name)
    # What is here already is not looked at, and so not copied, by the collector of each rank.
    gc.freeze()


_TORCHS = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.utils.checkpoint",
)
_OURS = [
    f"forgather.ml.{name}"
    for name in (
        "strategy.data_parallel",
        "strategy.fsdp2",
        "strategy.pipeline.strategy",
        "strategy.pipeline.schedules",
        "trainer.accel",
        "trainer.pipeline",
    )
]


@functools.cache
def import_compiler():
    """Compiles something once, here: what that imports takes each rank seconds."""
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))
    torch.compiler.reset()
    gc.freeze()


@functools.cache
def import_engine():
    """Imports DeepSpeed once, here: it imports torch's compiler, which takes each rank seconds."""
    from forgather.ml.strategy.deepspeed import import_deepspeed

    import_deepspeed("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    gc.freeze()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def become_rank(rank, world_size, port):
    """Makes this process one of several: the variables that torchrun would set, and one thread."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    # An earlier test of this session may have set up Accelerate for one process.
    AcceleratorState._reset_state(reset_partial_state=True)


def _work(there, rank, world_size, port, start_group, function, args):
    become_rank(rank, world_size, port)
    try:
        if start_group:
            import datetime

            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=patience(20)))
        answer = (True, function(*args))
    except BaseException:  # noqa: BLE001 - the border of a test's child process
        answer = (False, traceback.format_exc())
    with suppress(BrokenPipeError):
        there.send_bytes(pickle.dumps(answer))
    there.close()
    # Rank 0 keeps the store that slower ranks still read: nobody goes before the parent has heard all and ends them.
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
