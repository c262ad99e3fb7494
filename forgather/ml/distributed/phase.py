"""The phase of the current process, for error reports: its activity and the optimizer step.

The training loop sets the phase, which costs about a microsecond. Other processes read the phase from a small
memory-mapped file. The file still has the last phase after the process has died, even by SIGKILL.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

FILE = "whereabouts"
_SIZE = 256


class RunPhase(NamedTuple):
    """The activity and the optimizer step of a process.

    Args:
        phase: the name of the activity, for example "forward and backward"; "" if it is unknown.
        step: the optimizer step that is being computed, counted from 1, or None outside of the training loop.
    """

    phase: str = ""
    step: int | None = None

    def __str__(self) -> str:
        parts = ([f"step {self.step}"] if self.step is not None else []) + ([self.phase] if self.phase else [])
        return ", ".join(parts)


class _Here:
    def __init__(self) -> None:
        self.current = RunPhase()
        self.shown: mmap.mmap | None = None


# Process-wide, not thread-local: the watchdog thread reads what the main thread sets.
_here = _Here()


def set_phase(phase: str, step: int | None = None) -> None:
    """Sets the phase of this process.

    Args:
        phase: the name of the activity that begins now.
        step: the optimizer step that is being computed, counted from 1, or None outside of the training loop.
    """
    _here.current = RunPhase(phase, step)
    if _here.shown is not None:
        _here.shown[:] = _line(_here.current)


def current_phase() -> RunPhase:
    """Returns the phase of this process."""
    return _here.current


def publish_phase(folder: Path) -> None:
    """Writes the phase of this process to a file in `folder`, now and at each later call of `set_phase`."""
    with (folder / FILE).open("wb+") as stream:
        stream.write(_line(_here.current))
        stream.flush()
        # Memory-mapped: an update costs no system call, and the kernel writes the page back after SIGKILL too.
        _here.shown = mmap.mmap(stream.fileno(), _SIZE)


def read_phase(folder: Path) -> RunPhase:
    """Returns the last phase that a process published in `folder`, or an empty `RunPhase` if there is no file."""
    try:
        text = (folder / FILE).read_bytes().decode(errors="replace")
    except OSError:
        return RunPhase()
    # The file is padded with blanks and may be read while it is written; a broken number counts as no step.
    step, _, phase = text.rstrip("\n ").partition("\t")
    return RunPhase(phase, int(step) if step.isdigit() else None)


def _line(where: RunPhase) -> bytes:
    step = "" if where.step is None else str(where.step)
    # A fixed size, so that a shorter phase overwrites all of a longer one. A cut multi-byte character is replaced on
    # reading.
    return f"{step}\t{where.phase}".encode()[: _SIZE - 1].ljust(_SIZE - 1) + b"\n"
