"""The report of a run as one HTML page: `write_report(run_dir)` writes `report.html` from the files in the run folder.

The input is a run folder with any of `metrics.jsonl`, `samples.jsonl`, `summary.json`, `run.json` and `config.yaml`.
The output is the path of the page. The page needs no network and no other file. A report is also written if the run was
killed or if one of the files is damaged.
"""

from __future__ import annotations

import os
from pathlib import Path

from forgather.ml.report.page import page
from forgather.ml.report.run_data import read_facts
from forgather.replaced_file import replace_file

REPORT_FILE = "report.html"

__all__ = ["REPORT_FILE", "write_report"]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes the report of a run into its folder.

    Args:
        run_dir: the run folder.

    Returns:
        The path of `report.html`.

    Raises:
        ReportError: FG850 if the folder does not exist or has no record of a run.
    """
    folder = Path(run_dir)
    text = page(read_facts(folder))
    # In one step, so that a browser never shows a part of the page. JSON can contain lone surrogates, UTF-8 cannot.
    replace_file(folder / REPORT_FILE, text.encode("utf-8", "replace"))
    return folder / REPORT_FILE
