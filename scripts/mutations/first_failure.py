"""Plugin of pytest that writes the name of the first test that fails into the file that `run.py` names."""

import os
from pathlib import Path


def _note(report):
    told = Path(os.environ["FORGATHER_FIRST_FAILURE"])
    if report.failed and not told.exists():
        told.write_text(report.nodeid, encoding="utf-8")


pytest_runtest_logreport = pytest_collectreport = _note
