"""The result of a check: what was found, and what to do about it.

A check that could not run says why. It never counts as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The verdict of a check. `NOTE` is something to know, which stops no run."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What one check found.

    Args:
        name: the subject of the check, in a few words.
        state: the verdict.
        found: what was found; for a check that did not run, the reason.
        fix: what to do; "" if there is nothing to do.
        values: measured numbers by name, with the unit at the end of each name.
    """

    name: str
    state: State
    found: str
    fix: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def ok(name: str, found: str, **values: Any) -> CheckResult:
    """Returns the result of a check that found nothing wrong."""
    return CheckResult(name=name, state=State.OK, found=found, values=values)


def note(name: str, found: str, fix: str = "", **values: Any) -> CheckResult:
    """Returns something to know, which stops no run."""
    return CheckResult(name=name, state=State.NOTE, found=found, fix=fix, values=values)


def wrong(name: str, found: str, fix: str, **values: Any) -> CheckResult:
    """Returns a fault with its fix."""
    return CheckResult(name=name, state=State.WRONG, found=found, fix=fix, values=values)


def not_checked(name: str, reason: str) -> CheckResult:
    """Returns the result of a check that could not run."""
    return CheckResult(name=name, state=State.NOT_CHECKED, found=reason)


def attempt(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    """Returns the result of a check; if the system lacks or refuses what it needs, it is not checked, with the reason.

    Args:
        name: the subject of the check.
        check: the check.
    """
    try:
        return check()
    except (OSError, RuntimeError, ValueError, LookupError, ImportError) as error:
        lines = str(error).strip().splitlines()
        return not_checked(name, f"{type(error).__name__}: {lines[0][:160] if lines else 'without a message'}")
