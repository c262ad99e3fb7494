"""The model FLOPs utilization (MFU) of a run: its measured speed times the FLOPs of its plan, as a share of the peak.

The input is the run folder, into which `fgcli train` writes the plan as `plan.json`, and the speeds of a log line. The
FLOPs are those that the plan has traced, and the peak rate is that of the table of hardware. The plan counts attention
for the mean document of its first rows; a line counts it for the documents of its own steps. A plan may be written
while the run goes on; lines before that, and runs without a plan, have no MFU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgather.planner.memory_plan import PLAN_FILE


class Utilization:
    """Adds `mfu` to log lines.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: str) -> None:
        self._file = Path(run_dir) / PLAN_FILE
        self._speed = ""
        self._share = self._share_of_documents = 0.0
        self._document_length: float | None = None
        self._is_read = False

    def metrics(self, values: Mapping[str, float], *, document_length: float | None = None) -> dict[str, float]:
        """Returns the MFU of a log line, as a share between 0 and 1; nothing without a plan of the time of a step.

        Args:
            values: the metrics of the line, with `tokens_per_second` or `samples_per_second`.
            document_length: the length of the document of a token, as a mean over the tokens of the line; None if it is
                unknown.

        Units:
            document_length: tokens.
        """
        if not self._is_read and self._file.is_file():
            self._is_read = True
            self._read()
        if self._speed not in values:
            return {}
        share = self._share
        if document_length is not None and self._document_length:
            share += self._share_of_documents * (document_length / self._document_length - 1)
        return {"mfu": values[self._speed] * share}

    def _read(self) -> None:
        try:
            plan: Any = json.loads(self._file.read_text(encoding="utf-8"))
            step, tokens = plan["time"]["step"], plan["tokens_per_row"]
            # A share of the peak for each token (or row) a second.
            scale = 1 / (plan["rows_per_update"] * (tokens or 1) * step["peak_flops"] * plan["world_size"])
            self._share = step["model_flops"] * scale
            # A plan of an earlier release counts no documents.
            self._share_of_documents = step.get("document_flops", 0) * scale
            self._document_length = step.get("document_length")
            self._speed = "samples_per_second" if tokens is None else "tokens_per_second"
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
            # No device was known, or the plan is damaged: a run does not end because of its log.
            return
