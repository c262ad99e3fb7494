"""What this process is doing: the step and the phase of its run, for whoever asks when something goes wrong.

Takes notes of the loop; gives them to this process, and through a small file to others. Keeps true: a note costs about
a microsecond and outlives the process that made it, however it died.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

FILE = "whereabouts"
_SIZE = 256


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Where a process is.

    Args:
        phase: what it does, as in "forward and backward"; "" where nobody said.
        step: the optimizer step that it works on, from 1; None outside the loop.
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


_here = _Here()


def enter(phase: str, step: int | None = None) -> None:
    """Notes what this process does from now on."""
    _here.current = RunPhase(phase, step)
    if _here.shown is not None:
        _here.shown[:] = _line(_here.current)


def current() -> RunPhase:
    """Returns what this process does."""
    return _here.current


def publish_in(folder: Path) -> None:
    """Keeps the notes of this process in a file of `folder`, too."""
    with (folder / FILE).open("wb+") as stream:
        stream.write(_line(_here.current))
        stream.flush()
        _here.shown = mmap.mmap(stream.fileno(), _SIZE)


def read_from(folder: Path) -> RunPhase:
    """Returns the last note of the process that showed its notes in `folder`; an empty one where none did."""
    try:
        text = (folder / FILE).read_bytes().decode(errors="replace")
    except OSError:
        return RunPhase()
    step, _, phase = text.rstrip("\n ").partition("\t")
    return RunPhase(phase, int(step) if step.isdigit() else None)


def _line(where: RunPhase) -> bytes:
    step = "" if where.step is None else str(where.step)
    return f"{step}\t{where.phase}".encode()[: _SIZE - 1].ljust(_SIZE - 1) + b"\n"
