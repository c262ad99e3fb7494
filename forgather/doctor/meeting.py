"""Checks between machines: each runs the doctor with its own rank, and they meet at a store of machine 0.

All machines compare the same facts, so each of them reports every fault. A machine that does not come, or that leaves
in the middle, is a fault of its own; the checks that need it are not checked.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, TextIO

from forgather.doctor.result import CheckResult, not_checked, note, ok, wrong
from forgather.doctor.traffic import PROBE, all_reduce

_MOST_CLOCK_SECONDS = 1.0
_SEEN_SECONDS = 10.0
"""NFS clients keep the content of a folder for some seconds."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this machine among all.

    Args:
        nodes: the number of machines.
        rank: the rank of this machine, from 0.
        master: the host and the port of the rendezvous.
        timeout: the maximum wait for other machines, in seconds.
    """

    nodes: int
    rank: int
    master: tuple[str, int]
    timeout: float


class Meeting:
    """The machines that have met, and what they tell each other."""

    def __init__(self, place: Place, store: Any) -> None:
        self.place = place
        self._store = store

    def share(self, key: str, value: Any) -> list[Any]:
        """Returns the values that all machines give for a key, by their ranks; waits for all of them.

        Raises:
            RuntimeError: if a machine does not give one in time.
        """
        self._store.set(f"{key}/{self.place.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.place.nodes)]

    def claim(self) -> int:
        """Returns how many machines have claimed the rank of this one, this one included."""
        return int(self._store.add(f"rank/{self.place.rank}", 1))

    def clock_offset(self) -> float:
        """Returns how far the clock of machine 0 is ahead of this one's, in seconds, by half of a round trip."""
        if self.place.rank == 0:
            for rank in range(1, self.place.nodes):
                self._store.get(f"clock/asked/{rank}")
                self._store.set(f"clock/answer/{rank}", repr(time.time()))
            return 0.0
        sent = time.time()
        self._store.set(f"clock/asked/{self.place.rank}", "")
        there = float(self._store.get(f"clock/answer/{self.place.rank}"))
        return there - (sent + time.time()) / 2

    def leave(self) -> None:
        """Waits until all machines have left; the store ends with machine 0."""
        left = self._store.add("left", 1)
        end = time.monotonic() + self.place.timeout
        while self.place.rank == 0 and left < self.place.nodes and time.monotonic() < end:
            time.sleep(0.05)
            left = self._store.add("left", 0)


def between_machines(
    place: Place, facts: Mapping[str, Any], folder: str, *, names: Sequence[str] | None = None
) -> Iterator[CheckResult]:
    """Yields the results of the checks between machines.

    Args:
        place: the place of this machine.
        facts: what is compared: "versions" and "git", each a mapping, "address" of this machine, and its number of
            "gpus".
        folder: the folder that all machines should share.
        names: the names of the checks, which are the same on all machines; all of `CHECKS` by default.
    """
    names = tuple(CHECKS) if names is None else tuple(names)
    meeting, result = _met(place)
    yield result
    for number, name in enumerate(names):
        try:
            if meeting is None:
                yield not_checked(name, "the machines did not meet")
            else:
                yield CHECKS[name](meeting, facts, folder)
        except (RuntimeError, OSError) as error:
            if isinstance(error, OSError):
                yield wrong(name, f"this machine cannot do its part: {error}", "allow what the system refuses")
            else:
                yield wrong(name, f"a machine left: {_first_line(error)}", "see what the doctor printed there")
            yield from (not_checked(left, "a machine left") for left in names[number + 1 :])
            return
    if meeting is not None:
        meeting.leave()


def _met(place: Place) -> tuple[Meeting | None, CheckResult]:
    """Returns the machines that have met, or None, and the result of the check that they meet."""
    name, (host, port) = "machines", place.master
    try:
        probe = import_module(PROBE)
        store = probe.open_store(host, port, is_host=place.rank == 0, timeout_seconds=place.timeout)
        meeting = Meeting(place, store)
        if meeting.claim() > 1:
            fix = "give each machine its own --node-rank"
            return None, wrong(name, f"two machines have --node-rank {place.rank}", fix)
        counts = meeting.share("nodes", place.nodes)
    except RuntimeError as error:
        found = f"not all {place.nodes} met at {host}:{port} in {place.timeout:.0f} s ({_first_line(error)})"
        return None, wrong(name, found, "start the doctor on all machines with the same --master-addr; open the port")
    if len(set(counts)) > 1:
        return meeting, wrong(name, f"they count {', '.join(map(str, counts))}", "give the same --nnodes everywhere")
    return meeting, ok(name, f"{place.nodes} met at {host}:{port}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _versions(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    every = meeting.share("versions", dict(facts["versions"]))
    names = sorted({name for one in every for name in one})
    differing = [name for name in names if len({json.dumps(one.get(name)) for one in every}) > 1]
    if differing:
        shown = "; ".join(f"{name}: {', '.join(str(one.get(name)) for one in every)}" for name in differing)
        return wrong("versions", f"differ between machines: {shown}", "install the same versions on all machines")
    return ok("versions", "the same on all machines")


def _clocks(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    offsets = meeting.share("offsets", meeting.clock_offset())
    away = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    if abs(offsets[away]) > _MOST_CLOCK_SECONDS:
        found = f"that of machine {away} is {abs(offsets[away]):.1f} s {'behind' if offsets[away] > 0 else 'ahead'}"
        return wrong(
            "clocks", found, "let a time server set it: timedatectl set-ntp true", offset_seconds=offsets[away]
        )
    return ok("clocks", f"at most {abs(offsets[away]) * 1000:.0f} ms apart", offset_seconds=offsets[away])


def _git(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    every = meeting.share("git", facts["git"])
    if all(one is None for one in every):
        return not_checked("git state", "the folder is in no repository")
    commits = [None if one is None else str(one["commit"])[:10] for one in every]
    if len(set(commits)) > 1:
        return wrong(
            "git state", f"commits differ: {', '.join(map(str, commits))}", "check out the same commit everywhere"
        )
    dirty = [str(rank) for rank, one in enumerate(every) if one["dirty"]]
    if dirty:
        return note("git state", f"{commits[0]}, with changes on machine {', '.join(dirty)}")
    return ok("git state", f"{commits[0]} on all machines")


def _reachability(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    """Connects to each other machine at the address that gloo would take there."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(meeting.place.nodes)
        targets = meeting.share("listeners", [facts["address"], listener.getsockname()[1]])
        failed = []
        for rank, (host, port) in enumerate(targets):
            try:
                socket.create_connection((host, port), timeout=3).close()
            except OSError as error:
                failed.append(f"{meeting.place.rank} to {rank} ({host}): {error.strerror or error}")
        every = [one for failures in meeting.share("connections", failed) for one in failures]
    if every:
        fix = "open all ports between the machines, or select another interface by GLOO_SOCKET_IFNAME"
        return wrong("reachability", "; ".join(every), fix)
    return ok("reachability", "each machine reaches each other one")


def _shared_folder(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    """Writes, renames and locks files in a folder of machine 0, and looks whether the others see it."""
    name, rank = "shared folder", meeting.place.rank
    fix = "set output_dir to a folder that all machines share (NFS, Lustre, ...), mounted at the same place"
    inside = os.path.join(folder, meeting.share("folder", f".forgather-doctor-{secrets.token_hex(6)}")[0])
    made = meeting.share("made", _problem(lambda: os.mkdir(inside)) if rank == 0 else None)
    if made[0]:
        return wrong(name, f"machine 0 cannot write to {folder}: {made[0]}", fix)
    try:
        seen = meeting.share("seen", _until(lambda: os.path.isdir(inside)))
        if not all(seen):
            away = ", ".join(str(one) for one, is_seen in enumerate(seen) if not is_seen)
            return wrong(name, f"machine {away} does not see what machine 0 writes to {folder}", fix)
        problems = meeting.share("written", _problem(lambda: _write_and_rename(os.path.join(inside, str(rank)))))
        if any(problems):
            return wrong(name, f"a machine cannot write to {folder}: {next(filter(None, problems))}", fix)
        all_seen = lambda: all(_reads(os.path.join(inside, str(one))) for one in range(meeting.place.nodes))  # noqa: E731
        if not all(meeting.share("read", _until(all_seen))):
            return wrong(name, f"files that are renamed in {folder} are not seen by all machines", fix)
        if problem := _lock_problem(meeting, os.path.join(inside, "0")):
            return wrong(name, f"{folder}: {problem}", "mount it without nolock, and start its lock service (NFS)")
        return ok(name, f"{folder}: all machines see each other's files, renames and locks")
    finally:
        if rank == 0:
            # NFS keeps a file that another machine has open under another name.
            shutil.rmtree(inside, ignore_errors=True)


def _problem(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _until(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + _SEEN_SECONDS
    while not (found := is_true()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _write_and_rename(file: str) -> None:
    with open(f"{file}.new", "w", encoding="ascii") as stream:
        stream.write("done")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(f"{file}.new", file)


def _reads(file: str) -> bool:
    try:
        with open(file, encoding="ascii") as stream:
            return stream.read() == "done"
    except OSError:
        return False


def _lock_problem(meeting: Meeting, file: str) -> str:
    """Returns what is wrong with locks between machines; "" if nothing is."""
    with open(file, "r+", encoding="ascii") as stream:
        first = _locked(stream) if meeting.place.rank == 0 else None
        if isinstance(refused := meeting.share("lock", first)[0], str):
            return f"machine 0 cannot lock a file: {refused}"
        answers = meeting.share("second lock", None if meeting.place.rank == 0 else _locked(stream))
    for rank, answer in enumerate(answers[1:], start=1):
        if answer is not False:
            how = "is not kept out by a lock of machine 0" if answer is True else f"cannot lock a file: {answer}"
            return f"machine {rank} {how}"
    return ""


def _locked(stream: TextIO) -> bool | str:
    """Locks a file; returns whether no other machine has locked it, or why it cannot be locked."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.strerror or str(error)
    return True


def _all_reduce(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    place = meeting.place
    return all_reduce("gloo", place.master, ranks=(place.rank,), world_size=place.nodes, timeout=place.timeout)


def _nccl(meeting: Meeting, facts: Mapping[str, Any], folder: str) -> CheckResult:
    place, gpus = meeting.place, meeting.share("gpus", facts["gpus"])
    if not all(gpus):
        return not_checked("all-reduce (nccl)", "not measured: not every machine has a GPU")
    return all_reduce("nccl", place.master, ranks=(place.rank,), world_size=place.nodes, timeout=place.timeout)


CHECKS: Mapping[str, Callable[[Meeting, Mapping[str, Any], str], CheckResult]] = MappingProxyType(
    {
        "versions": _versions,
        "clocks": _clocks,
        "git state": _git,
        "reachability": _reachability,
        "shared folder": _shared_folder,
        "all-reduce (gloo)": _all_reduce,
        "all-reduce (nccl)": _nccl,
    }
)
"""The checks between machines that have met, in their order."""
