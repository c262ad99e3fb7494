"""How far a trial is, read from the run folders below its output folder.

The input is the folder of a trial; the output is the values of the metric by step, and the status of the newest run.
Each reading takes new bytes only.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress

from forgather.run_status import RunStatus, read_status
from forgather.runs.growing_file import GrowingFile
from forgather.runs.metric_records import Record, numbers_of
from forgather.runs.run_folders import newest_run

_METRICS_FILE, _RUNS = "metrics.jsonl", "runs"
_OF_EVALUATION = "eval_"


class TrialProgress:
    """The values of a metric that a trial has logged so far.

    Args:
        folder: the output folder of the trial, which may not exist yet.
        metric: the name of the metric.
    """

    def __init__(self, folder: str, metric: str) -> None:
        self.folder = folder
        self.metric = metric
        self.curve: list[tuple[int, float]] = []
        self.names: set[str] = set()
        self.step: int | None = None
        self._evaluated_at: int | None = None
        self._file: GrowingFile | None = None

    @property
    def run_dir(self) -> str | None:
        """The folder of the newest run, or None before the first one."""
        runs = os.path.join(self.folder, _RUNS)
        try:
            found = [os.path.join(runs, name) for name in os.listdir(runs)]
        except OSError:
            return None
        return newest_run(folder for folder in found if os.path.isdir(folder))

    def lacks_metric(self, *, is_over: bool) -> bool:
        """Returns whether the trial has logged values, but not the metric, although it has evaluated.

        Args:
            is_over: whether the trial has finished; it then logs nothing more.
        """
        if not self.names or self.metric in self.names or self.curve:
            return False
        # An evaluation may write several lines; all of them are there when a later step has one.
        return is_over or (self._evaluated_at is not None and (self.step or 0) > self._evaluated_at)

    def status(self) -> RunStatus | None:
        """Returns the status of the newest run, or None if it does not say."""
        run_dir = self.run_dir
        return None if run_dir is None else read_status(run_dir)

    def update(self) -> None:
        """Reads what was logged since the last call."""
        run_dir = self.run_dir
        if run_dir is None:
            return
        file = os.path.join(run_dir, _METRICS_FILE)
        # A resumed run starts another file. Until it has a line, the values of the earlier one count.
        if (self._file is None or file != self._file.file) and os.path.exists(file):
            self._restart()
            self._file = GrowingFile(file, self._restart)
        if self._file is not None:
            # A file that cannot be read now can be read later.
            with suppress(OSError):
                for record in self._file.records():
                    self._take(record)

    def _restart(self) -> None:
        self.curve, self.step = [], None

    def _take(self, record: Record) -> None:
        step, numbers = record.get("step"), numbers_of(record)
        if step is None or "event" in record:
            return  # a line that belongs to no step, or what happened at one
        self.step = step
        self.names |= numbers.keys()
        if self._evaluated_at is None and any(name.startswith(_OF_EVALUATION) for name in numbers):
            self._evaluated_at = step
        if self.metric in numbers:
            value = numbers[self.metric]
            self.curve.append((step, value if math.isfinite(value) else math.nan))
