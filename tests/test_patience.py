"""Limits of tests grow with what the machine has to do; none is a number of seconds by itself."""

import re
from pathlib import Path

from tests import patience as module
from tests.patience import patience, slowness

FIXED = re.compile(r"subprocess.*\btimeout=\d|communicate\(timeout=\d|\.wait\((timeout=)?[1-9]|_timeout_seconds=\d\d")
ON_PURPOSE = {"test_foundation.py"}  # it looks at the time that was set


def test_a_limit_grows_with_the_time_that_the_same_work_takes(monkeypatch):
    monkeypatch.setattr(module, "_last", (float("-inf"), 1.0))
    monkeypatch.setattr(module, "_IDLE_SECONDS", 1e-4)
    busy = patience(1)
    monkeypatch.setattr(module, "_last", (float("-inf"), 1.0))
    monkeypatch.setattr(module, "_IDLE_SECONDS", 1e4)
    assert 1 == slowness() and patience(1) == 2 < busy


def test_a_test_that_is_stuck_is_ended_after_a_limit_that_grew(request):
    (limit,) = [marker.args[0] for marker in request.node.iter_markers("timeout")] or [None]
    assert limit is None or limit >= 600


def test_no_process_is_waited_for_by_a_fixed_time():
    found = [
        f"{file.name}: {line.strip()}"
        for file in sorted(Path(__file__).parent.rglob("*.py"))
        if file.name not in ON_PURPOSE
        for line in file.read_text(encoding="utf-8").splitlines()
        if FIXED.search(line)
    ]
    assert [] == found
