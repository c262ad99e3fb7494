"""A pytest plugin that writes the name of the first failing test into the file that `run.py` names."""

import os
from pathlib import Path


def _note(report):
    report_file = Path(os.environ["FORGATHER_FIRST_FAILURE"])
    if report.failed and not report_file.exists():
        report_file.write_text(report.nodeid, encoding="utf-8")


pytest_runtest_logreport = pytest_collectreport = _note
