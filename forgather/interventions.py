"""The changes that a user made to a run while it went on, as `interventions.jsonl` in the run folder records them.

A line is written before the change is made. `fgcli rerun` makes the same changes after the same steps, so that the
repeated run writes the same losses.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

from forgather.bounded import MAX_RECORD_BYTES, read_bytes
from forgather.errors import ControlError
from forgather.run_control import SETTABLE, Action
from forgather.source import Span

FILE = "interventions.jsonl"
# No setting, rate, factor or time is as large: a file with a larger one is damaged.
_MOST = 2**53


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A change that a user made to a run: a setting with a new value, or the end of the run.

    Args:
        step: the last finished optimizer step when the change was made.
        action: `Action.SET` or `Action.STOP`.
        name: the setting; empty for `Action.STOP`.
        value: the new value of the setting; None for `Action.STOP`.
        before: the value until then, or None.
        factor: the number by which the rates of the schedule are multiplied from now on, if the setting is the
            learning rate; else None.
        who: the user.
        host: the machine from which the user made it.
        when: the time in seconds since 1970.
    """

    step: int
    action: Action
    name: str = ""
    value: float | None = None
    before: float | None = None
    factor: float | None = None
    who: str = ""
    host: str = ""
    when: float = 0.0

    @property
    def text(self) -> str:
        """What was changed and when, in words."""
        what = "stopped" if self.value is None else f"{self.name} set to {self.value:.5g}"
        return f"{what} after step {self.step:,}"


def record(run_dir: str, interventions: list[Intervention]) -> None:
    """Appends interventions to the file of a run folder; they are on the disk when the function returns.

    Args:
        run_dir: the run folder.
        interventions: the interventions.

    Raises:
        OSError: if the file cannot be written. It is then as before.
    """
    lines = b"".join(json.dumps(asdict(one), allow_nan=False).encode("ascii") + b"\n" for one in interventions)
    descriptor = os.open(os.path.join(run_dir, FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        begin = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, lines) != len(lines):
                raise OSError("no space left for a whole line")
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, begin)
            raise
    finally:
        os.close(descriptor)


def read_interventions(run_dir: str) -> list[Intervention]:
    """Returns the interventions of a run, in their order.

    Args:
        run_dir: the run folder.

    Returns:
        The interventions. An incomplete last line is left out, because its change was not made.

    Raises:
        ControlError: FG518 if the file is damaged.
    """
    file = os.path.join(run_dir, FILE)
    try:
        lines = read_bytes(file, MAX_RECORD_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _damaged(file, 1, error.strerror or str(error)) from None
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(from_dict(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _damaged(file, number, "the line is not an intervention") from None
    return found


def from_dict(values: Any) -> Intervention:
    """Returns an intervention from its fields.

    Raises:
        ValueError, TypeError, KeyError: if the fields are not those of an intervention.
    """
    one = Intervention(**{**values, "action": Action(values["action"])})
    is_set = one.action is Action.SET and one.name in SETTABLE
    if type(one.step) is not int or not 0 <= one.step < _MOST or not (is_set or one.action is Action.STOP):
        raise ValueError("it changes nothing that can be changed")
    numbers = [number for number in (one.value, one.before, one.factor, one.when) if number is not None]
    if not all(type(number) in (int, float) and 0 <= number < _MOST for number in numbers):
        raise ValueError("a value is not a number from 0")
    if is_set and (one.value is None or not SETTABLE[one.name].accepts(one.value)):
        raise ValueError(f"{one.name} cannot be {one.value!r}")
    if (one.name == "learning_rate") != bool(one.factor):
        raise ValueError("a learning rate has a factor, and no other setting has one")
    return one


def _damaged(file: str, line: int, why: str) -> ControlError:
    return ControlError(
        f"the interventions of the run cannot be repeated: {why}",
        code="FG518",
        span=Span(file, line),
        hint="take the file from a backup; without it, the repeated run is another run",
    )


_repeated: ContextVar[str | None] = ContextVar("repeated", default=None)


@contextmanager
def repeating(run_dir: str) -> Iterator[None]:
    """Context manager in which a run makes the interventions of an earlier run.

    Args:
        run_dir: the folder of the earlier run.
    """
    token = _repeated.set(run_dir)
    try:
        yield
    finally:
        _repeated.reset(token)


def repeated_run() -> str | None:
    """Returns the folder of the run whose interventions are to be made again, or None."""
    return _repeated.get()
