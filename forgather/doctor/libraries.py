"""Checks of installed libraries: against the oldest versions that work, and those that Forgather is tested with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping

from forgather.doctor.result import CheckResult, note, ok, wrong

_RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tested_versions.json")


def tested_versions() -> dict[str, dict[str, str]]:
    """Returns the oldest and the tested version of each library: {"oldest": {...}, "tested": {...}}."""
    with open(_RECORD, encoding="utf-8") as stream:
        found: dict[str, dict[str, str]] = json.load(stream)
    return found


def check_versions(installed: Mapping[str, str | None]) -> Iterator[CheckResult]:
    """Checks the versions of the libraries that every run needs, and compares the others with the tested ones.

    Args:
        installed: the installed version of each library; None for a library that is not installed.
    """
    record = tested_versions()
    faults, others = [], []
    for library, oldest in record["oldest"].items():
        found = installed.get(library)
        if found is None:
            faults.append((library, f"{library} is not installed"))
        elif _numbers(found) < _numbers(oldest):
            faults.append((library, f"{library} is {found}, and {oldest} is the oldest that works"))
    for library, tested in record["tested"].items():
        found = installed.get(library)
        if found is not None and _numbers(found)[:2] != _numbers(tested)[:2]:
            others.append(f"{library} {found} (tested: {tested})")
    for library, message in faults:
        yield wrong("libraries", message, f"pip install -U '{library}>={record['oldest'][library]}'")
    if others:
        yield note("libraries", f"other versions than tested: {', '.join(others)}")
    elif not faults:
        yield ok("libraries", "as tested")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the release of a version as numbers: (2, 13, 0) of "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
