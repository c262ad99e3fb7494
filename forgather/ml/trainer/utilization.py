"""The model FLOPs utilization (MFU) of a run: its measured speed times the FLOPs of its plan, as a share of the peak.

The input is the run folder, into which `fgcli train` writes the plan as `plan.json`, and the speeds of a log line. The
FLOPs are those that the plan has traced, and the peak rate is that of the table of hardware. A plan may be written
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
        self._share = 0.0
        self._is_read = False

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the MFU of a log line, as a share between 0 and 1; nothing without a plan of the time of a step.

        Args:
            values: the metrics of the line, with `tokens_per_second` or `samples_per_second`.
        """
        if not self._is_read and self._file.is_file():
            self._is_read = True
            self._read()
        return {"mfu": values[self._speed] * self._share} if self._speed in values else {}

    def _read(self) -> None:
        try:
            plan: Any = json.loads(self._file.read_text(encoding="utf-8"))
            step, tokens = plan["time"]["step"], plan["tokens_per_row"]
            # A share of the peak for each token (or row) a second.
            of_one = step["model_flops"] / (plan["rows_per_update"] * (tokens or 1))
            self._share = of_one / (step["peak_flops"] * plan["world_size"])
            self._speed = "samples_per_second" if tokens is None else "tokens_per_second"
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
            # No device was known, or the plan is damaged: a run does not end because of its log.
            return
