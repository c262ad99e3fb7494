"""Checks of the operating system: memory, shared memory, open files, the clock, and the speed of a disk.

Each limit below which a check fails is a constant with its reason. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from forgather.available_memory import CGROUP, MEMINFO, container_bytes, machine_bytes
from forgather.doctor.result import CheckResult, not_checked, note, ok, wrong

_GIB = 2**30
_LEAST_MEMORY = 2 * _GIB
"""PyTorch and its libraries take about 0.5 GiB in each process."""
_LEAST_SHARED = _GIB
"""A container has 64 MiB by default; NCCL and the workers of data loaders end with a bus error when it is full."""
_LEAST_FILES = 4096
"""Each worker of a data loader, connection and checkpoint part holds files open."""
_MOST_CLOCK_SECONDS = 5.0
_LEAST_SPEED = 20e6
"""Bytes per second; a checkpoint of 10 GB takes more than eight minutes below it."""


def check_memory(meminfo: str = MEMINFO, cgroup: str = CGROUP) -> CheckResult:
    """Checks the memory that processes can have: what is available, and the limit of a container.

    Args:
        meminfo: the file with the memory of the machine.
        cgroup: the folder with the limits of this container.
    """
    name = "memory"
    available, limit = machine_bytes(meminfo), container_bytes(cgroup)
    room = available if limit is None else min(available, limit)
    found = f"{room / _GIB:.1f} GiB available" + (" in this container" if room == limit else "")
    if room < _LEAST_MEMORY:
        return wrong(
            name, found, "end other processes, or give the machine or container more memory", available_bytes=room
        )
    return ok(name, found, available_bytes=room)


def check_shared_memory(folder: str = "/dev/shm") -> CheckResult:
    """Checks the size of the shared memory, through which processes of one machine exchange data.

    Args:
        folder: the folder of the shared memory.
    """
    name = "shared memory"
    if not os.path.isdir(folder):
        return not_checked(name, f"there is no {folder}")
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    found = f"{folder} has {free / _GIB:.2f} GiB free of {size / _GIB:.2f}"
    if free < _LEAST_SHARED:
        fix = "start the container with --shm-size=16g (docker), or mount an emptyDir of medium Memory (Kubernetes)"
        return wrong(name, found, fix, free_bytes=free)
    return ok(name, found, free_bytes=free)


def check_open_files() -> CheckResult:
    """Checks how many files a process may have open."""
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        most = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
        fix = f"ulimit -n {most}" if most >= _LEAST_FILES else "ask for a larger limit (nofile)"
        return wrong(name, f"a process may have {soft} files open", fix, limit=soft)
    return ok(name, "no limit" if soft == resource.RLIM_INFINITY else f"{soft} for each process", limit=soft)


def check_clock(folder: str, *, now: float | None = None) -> CheckResult:
    """Checks the clock of this machine: against the time that the file system of a folder gives, and for a clock that
    was never set.

    Args:
        folder: a folder, whose server may be another machine.
        now: the time of this machine, in seconds since 1970; the clock's by default.
    """
    name = "clock"
    written = os.stat(__file__).st_mtime
    with TemporaryDirectory(dir=folder) as inside:
        before = time.time() if now is None else now
        file = os.path.join(inside, "now")
        with open(file, "w", encoding="ascii"):
            pass
        away = os.stat(file).st_mtime - before
    if before < written - 86400:
        found = "it is set to a time before this program was installed"
        return wrong(name, found, "let a time server set it: timedatectl set-ntp true")
    if abs(away) > _MOST_CLOCK_SECONDS:
        found = f"the file system of {folder} is {abs(away):.0f} s {'ahead' if away > 0 else 'behind'}"
        return wrong(name, found, "let one time server set both: timedatectl set-ntp true", offset_seconds=away)
    return ok(name, "agrees with the file system", offset_seconds=away)


def check_disk_speed(folder: str, *, num_bytes: int = 32 * 2**20, least: float = _LEAST_SPEED) -> CheckResult:
    """Checks how fast a folder is written to, the time until the data is on the disk included.

    Args:
        folder: the folder.
        num_bytes: the bytes that are written and removed again.
        least: the speed below which the check fails, in bytes per second.
    """
    name = "disk speed"
    with _scratch_file(folder) as file:
        block = os.urandom(2**20)
        begin = time.perf_counter()
        with open(file, "wb") as stream:
            for _ in range(max(1, num_bytes // len(block))):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        speed = max(len(block), num_bytes) / (time.perf_counter() - begin)
    found = f"{speed / 1e6:.0f} MB/s to {folder}"
    if speed < least:
        return wrong(name, found, "write runs to another disk (output_dir), or save less often", bytes_per_second=speed)
    return ok(name, found, bytes_per_second=speed)


@contextmanager
def _scratch_file(folder: str) -> Iterator[str]:
    with TemporaryDirectory(dir=folder, prefix=".forgather-doctor-") as inside:
        yield os.path.join(inside, "block")


def check_processors(wanted: int) -> CheckResult:
    """Checks that this process may use a processor for each process of a run.

    Args:
        wanted: the number of processes on this machine.
    """
    name = "processors"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable < wanted:
        fix = "ask the scheduler for more cores per task, or start fewer processes"
        return note(name, f"{usable} for {wanted} processes", fix, usable=usable)
    return ok(name, f"{usable}", usable=usable)
