"""Results of the doctor as lines for the terminal, and as plain data for JSON.

The input is `CheckResult`s; the output is text or plain data. Each result is printed as soon as it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgather.cli.output import plural
from forgather.cli.palette import Look, styled
from forgather.doctor.result import CheckResult, State

_STATE_WIDTH = len(State.NOT_CHECKED)
_NAME_WIDTH = 18
_ROLES = {State.OK: "good", State.NOTE: "note", State.WRONG: "error", State.NOT_CHECKED: "dim"}
_HANG = _STATE_WIDTH + 2 + _NAME_WIDTH + 2


def line_of(result: CheckResult) -> str:
    """Returns the lines of one result: the verdict, the subject, what was found, and the fix below it."""
    lines = [f"{result.state:<{_STATE_WIDTH}}  {result.name:<{_NAME_WIDTH}}  {result.found}"]
    if result.fix:
        lines.append(f"{'':<{_HANG}}fix: {result.fix}")
    return "\n".join(lines)


def _paint(line: str) -> str:
    state = next((state for state in State if line.startswith(f"{state:<{_STATE_WIDTH}}  ")), None)
    if state is None:
        return styled("key", line)
    return styled(_ROLES[state], line[:_STATE_WIDTH]) + line[_STATE_WIDTH:]


LOOK = Look(_paint, lambda line: _HANG)
"""The colors of results, and where their further lines begin."""


def conclusion(results: Sequence[CheckResult]) -> str:
    """Returns the line below all results: how many faults there are, and how many checks did not run."""
    faults = sum(result.state is State.WRONG for result in results)
    left = sum(result.state is State.NOT_CHECKED for result in results)
    many = plural(len(results), "check")
    said = f"{plural(faults, 'fault')} in {many}" if faults else f"no fault in {many}"
    return f"\n{said}, {left} not checked" if left else f"\n{said}"


def as_data(results: Sequence[CheckResult]) -> dict[str, Any]:
    """Returns the results as plain data, and whether there is no fault."""
    return {
        "ok": all(result.state is not State.WRONG for result in results),
        "checks": [
            {
                "name": result.name,
                "state": str(result.state),
                "found": result.found,
                "fix": result.fix,
                "values": dict(result.values),
            }
            for result in results
        ],
    }
