"""The memory that processes can still allocate: of this machine, and under the limit of this container.

Takes the files in which Linux reports them. Memory that holds copies of files counts as available, because the system
takes it back when a process needs it.

Units:
    bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

MEMINFO = "/proc/meminfo"
CGROUP = "/sys/fs/cgroup"


def available_bytes(meminfo: str = MEMINFO, cgroup: str = CGROUP) -> int | None:
    """Returns the memory that can still be allocated here; None if the system does not report it.

    Args:
        meminfo: the file with the memory of the machine.
        cgroup: the folder with the limits of this container.
    """
    try:
        machine = machine_bytes(meminfo)
    except (OSError, LookupError, ValueError):  # only Linux has the file, and a sandbox may show less than Linux does
        machine = None
    return min((size for size in (machine, container_bytes(cgroup)) if size is not None), default=None)


def machine_bytes(meminfo: str = MEMINFO) -> int:
    """Returns the memory of this machine that can still be allocated.

    Args:
        meminfo: the file with the memory of the machine.

    Raises:
        OSError: if the file cannot be read.
        LookupError: if the file does not have the value.
    """
    with open(meminfo, encoding="ascii") as stream:
        lines = dict(line.split(":", 1) for line in stream if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024


def container_bytes(cgroup: str = CGROUP) -> int | None:
    """Returns the bytes that this container may still take; None without a limit.

    Args:
        cgroup: the folder with the limits of this container.
    """
    limit, used = container_limit(cgroup), _number(cgroup, "memory.current")
    if limit is None or used is None:
        return None
    return min(limit, max(0, limit - used + _copies_of_files(cgroup)))


def container_limit(cgroup: str = CGROUP) -> int | None:
    """Returns the bytes that the processes of this container may take together; None without a limit.

    Args:
        cgroup: the folder with the limits of this container.
    """
    return _number(cgroup, "memory.max")


def _number(folder: str, name: str) -> int | None:
    try:
        text = _text(folder, name).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _copies_of_files(cgroup: str) -> int:
    try:
        lines: Mapping[str, str] = dict(line.split() for line in _text(cgroup, "memory.stat").splitlines())
        return int(lines["active_file"]) + int(lines["inactive_file"])
    except (OSError, LookupError, ValueError):
        return 0


def _text(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="ascii") as stream:
        return stream.read()
