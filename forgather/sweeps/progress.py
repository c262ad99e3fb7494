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

_METRICS_FILE, _RUNS = "metrics.jsonl", "runs"


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
        self._file: GrowingFile | None = None

    @property
    def run_dir(self) -> str | None:
        """The folder of the newest run, or None before the first one."""
        runs = os.path.join(self.folder, _RUNS)
        try:
            names = [name for name in os.listdir(runs) if os.path.isdir(os.path.join(runs, name))]
        except OSError:
            return None
        # Two runs of one second have names that differ by a number at the end.
        newest = max(names, key=lambda name: (name.partition("-")[0], len(name), name), default=None)
        return None if newest is None else os.path.join(runs, newest)

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
        if self.metric in numbers:
            value = numbers[self.metric]
            self.curve.append((step, value if math.isfinite(value) else math.nan))
