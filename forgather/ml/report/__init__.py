"""A run as one page: `write_report(run_dir)` writes `report.html` from the files of the run alone.

Takes a run's folder with any of `metrics.jsonl`, `samples.jsonl`, `summary.json`, `run.json` and `config.yaml`; gives
the page's path. Keeps true: the page needs no network and no other file; a run that was killed, and a torn file,
give a page too.
"""

from __future__ import annotations

import os
from pathlib import Path

from forgather.ml.report.page import page
from forgather.ml.report.run_data import read_facts

REPORT_FILE = "report.html"

__all__ = ["REPORT_FILE", "write_report"]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes the report of a run into its folder.

    Args:
        run_dir: the folder that holds the run's files.

    Returns:
        The path of `report.html`.

    Raises:
        ReportError: if the folder does not exist or holds no record of a run.
    """
    folder = Path(run_dir)
    text = page(read_facts(folder))
    aside = folder / f".{REPORT_FILE}.{os.getpid()}"
    aside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(aside, folder / REPORT_FILE)
    return folder / REPORT_FILE
