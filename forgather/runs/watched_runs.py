"""The runs that are being watched: single ones, or those below a folder, where new ones appear.

The input is run folders and folders; the output is a `LiveRun` for each run that goes on, and a `RunSummary` for each
run that had ended before. A run that ends while it is being watched stays. The number of runs with curves is limited.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forgather.runs.live_run import LiveRun
from forgather.runs.metrics_file import best_value, read_content
from forgather.runs.run_folders import METRICS, FileState, FoundRun, find_runs
from forgather.runs.summary import RunSummary, read_facts, summary_of

MAX_FOLLOWED = 60
"""The number of runs whose curves are kept; of more than that, the last ones have none."""
_SEARCH_SECONDS, _SEARCH_SHARE = 2.0, 0.05
"""Units: seconds, and a share of the time. The time between two searches for new runs, and the most they may take."""
_MOST_READ_BYTES = 50_000_000


@dataclass(frozen=True)
class Ranking:
    """How runs are ordered.

    Args:
        metric: the metric whose best value counts.
        is_greater_better: whether greater values are better.
        title: what the runs are together, such as "sweep first".
        num_trials: the number of runs that there will be.
    """

    metric: str
    is_greater_better: bool
    title: str = ""
    num_trials: int = 0


class WatchedRuns:
    """The runs that are being watched.

    Args:
        runs: run folders.
        tops: folders below which runs are looked for.
        ranking: the order of the runs below the folders, which are then all listed; None to list only those that go on.

    Attributes:
        live: the runs whose curves are kept, by folder, in the order in which they were found.
        ended: the runs that had ended before they were found, by folder; empty without a ranking.
        version: a number that grows with each update.
        lock: a lock for a thread that updates or reads while others do.
    """

    def __init__(self, runs: Sequence[str], tops: Sequence[str] = (), ranking: Ranking | None = None) -> None:
        self.live: dict[str, LiveRun] = {folder: LiveRun(folder) for folder in runs}
        self.ended: dict[str, RunSummary] = {}
        self.version = 0
        self.lock = threading.Lock()
        self.tops = tuple(tops)
        self.ranking = ranking
        self._named = frozenset(runs)
        self._known: dict[str, dict[str, FileState]] = {}
        self._next_search = 0.0

    def update(self, now: float | None = None) -> bool:
        """Reads what has changed; returns whether something has changed that is shown.

        Args:
            now: the current time in seconds since 1970, or None to ask the clock.

        Raises:
            ProjectError: FG500 if a folder no longer exists or is too large to be searched.
        """
        instant = time.time() if now is None else now
        self.version += 1
        has_changed = self._search(instant)
        for run in self.live.values():
            has_changed |= run.update(instant, self.version)
        return has_changed

    def summaries(self) -> list[RunSummary]:
        """Returns all runs: the best first if there is a ranking, else the newest first."""
        found = [self._ranked(run) for run in self.live.values()] + list(self.ended.values())
        found.sort(key=lambda run: (run.started or 0.0, run.name), reverse=True)
        if self.ranking is None:
            return found
        # The runs of one output folder are attempts at the same trial, of which the last one counts.
        last = {os.path.dirname(run.folder): run for run in reversed(found)}
        sign = -1 if self.ranking.is_greater_better else 1
        return sorted(
            last.values(),
            key=lambda run: (run.best is None, 0.0 if run.best is None else sign * run.best.value, run.folder),
        )

    def _ranked(self, run: LiveRun) -> RunSummary:
        if self.ranking is None:
            return run.summary
        best = run.best(self.ranking.metric, is_greater_better=self.ranking.is_greater_better)
        return replace(run.summary, best=best)

    def _search(self, now: float) -> bool:
        """Looks for runs that have appeared or changed; returns whether there are some."""
        begin = time.monotonic()
        if not self.tops or begin < self._next_search:
            return False
        found = {run.folder: run for top in self.tops for run in find_runs(top)}
        gone = [folder for folder in (*self.live, *self.ended) if folder not in found and folder not in self._named]
        for folder in gone:
            self.live.pop(folder, None)
            self.ended.pop(folder, None)
        has_changed = bool(gone)
        for run in found.values():
            if run.folder not in self.live and self._known.get(run.folder) != run.files:
                has_changed |= self._add(run, now)
        end = time.monotonic()
        self._next_search = end + max(_SEARCH_SECONDS, (end - begin) / _SEARCH_SHARE)
        return has_changed

    def _add(self, found: FoundRun, now: float) -> bool:
        """Follows a run that goes on, or notes one that has ended; returns whether it is shown."""
        without = FoundRun(found.folder, {name: state for name, state in found.files.items() if name != METRICS})
        summary = summary_of(found.folder, read_facts(without), now)
        if summary.status is not None and summary.status.is_live and self._has_room():
            run = self.live[found.folder] = LiveRun(found.folder)
            run.update(now, self.version)
            self.ended.pop(found.folder, None)
            return True
        self._known[found.folder] = found.files
        if self.ranking is None:
            return False
        self.ended[found.folder] = _with_best(summary_of(found.folder, read_facts(found), now), self.ranking)
        return True

    def _has_room(self) -> bool:
        """Returns whether one more run can be followed; the one that ended first makes room for it."""
        if len(self.live) < MAX_FOLLOWED:
            return True
        over = next((run for run in self.live.values() if not run.is_live and run.folder not in self._named), None)
        if over is not None:
            del self.live[over.folder]
            if self.ranking is not None:
                self.ended[over.folder] = self._ranked(over)
        return over is not None


def _with_best(run: RunSummary, ranking: Ranking) -> RunSummary:
    try:
        content = read_content(os.path.join(run.folder, METRICS), _MOST_READ_BYTES)
    except OSError:
        return replace(run, best=None)
    return replace(run, best=best_value(content, ranking.metric, is_greater_better=ranking.is_greater_better))
