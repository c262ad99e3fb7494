"""A run as it is now, while it goes on: its status, its curves, its speed and what happened.

The input is a run folder; each update reads what has changed in it. The memory of a run does not grow with its length.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from forgather.redaction import hide
from forgather.run_status import Status
from forgather.runs.fact_store import sighting_of
from forgather.runs.growing_curve import GrowingCurve
from forgather.runs.growing_file import GrowingFile
from forgather.runs.metric_records import Event, Record, number_of, numbers_of
from forgather.runs.metrics_file import Best
from forgather.runs.run_folders import METRICS, FileState, FoundRun, file_states
from forgather.runs.summary import LOSSES, RunSummary, read_facts, summary_of

MAX_METRICS, MAX_EVENTS = 200, 50
"""What is kept of one run: a program may log a name of its own at each step."""
_NUM_RECENT = 40
"""The number of log lines from which the speed follows."""
_LATEST = 1e11
"""Units: seconds since 1970. A later time is damage."""


@dataclass(frozen=True)
class RunEvent(Event):
    """What happened at a step, and when it was read.

    Args:
        number: the number of the event in its file, from 1.
        version: the version of the update that found it.
    """

    number: int
    version: int


class LiveRun:
    """A run that is being watched.

    Args:
        folder: the run folder.

    Attributes:
        summary: the facts of the run, as they are now.
        curves: the curve of each metric, by name.
        events: the last events.
        version: the version of the last change, as it was given to `update`.
        restarted: the version at which the metrics were read from the beginning again.
        first_version: the version of the first update.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.curves: dict[str, GrowingCurve] = {}
        self.events: deque[RunEvent] = deque(maxlen=MAX_EVENTS)
        self.num_events = 0
        self.version = self.restarted = self.first_version = 0
        self._version = 0
        self._last_step: int | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=_NUM_RECENT)
        self._file = GrowingFile(os.path.join(folder, METRICS), self._restart)
        self._states: dict[str, FileState] | None = None
        self._facts: dict[str, Any] = {}
        self._shown: tuple[Any, ...] = ()
        self.summary = RunSummary(folder=folder, status=None)

    def update(self, now: float, version: int) -> bool:
        """Reads what has changed in the folder; returns whether something that is shown has changed.

        Args:
            now: the current time in seconds since 1970.
            version: a number that grows with each update; changes are marked with it.
        """
        self._version = version
        self.first_version = self.first_version or version
        states = {name: state for name, state in file_states(self.folder).items() if name != METRICS}
        if states != self._states:
            before = self._facts or None
            self._facts = read_facts(FoundRun(self.folder, states))
            self._facts["seen"] = sighting_of(self._facts, before, now)
            self._states = states
        has_new = self._read()
        found = summary_of(self.folder, self._facts, now)
        steps = [step for step in (found.step, self._last_step) if step is not None]
        metrics = {**found.metrics, **{name: curve.last for name, curve in self.curves.items()}}
        self.summary = replace(found, step=max(steps, default=None), metrics=metrics, best=self.best())
        shown = (found.status, found.cause, self.summary.step, found.max_steps)
        if not has_new and shown == self._shown:
            return False
        self._shown, self.version = shown, version
        return True

    def best(self, metric: str | None = None, *, is_greater_better: bool = False) -> Best | None:
        """Returns the best value of a metric; None if there is none.

        Args:
            metric: the name of the metric, or None for the one by which models of this run are compared.
            is_greater_better: whether greater values are better.
        """
        if metric is None:
            usual = [(name, False) for name in LOSSES if name in self.curves]
            requested = self._facts.get("requested")
            metric, is_greater_better = requested or (usual[0] if usual else ("", False))
        curve = self.curves.get(metric)
        found = None if curve is None else curve.best(is_greater_better=is_greater_better)
        return None if found is None else Best(metric, *found)

    @property
    def num_damaged(self) -> int:
        """The number of lines of the metrics file that are no records."""
        return self._file.position.num_damaged

    @property
    def damage(self) -> str:
        """The numbers of these lines, in words."""
        return self._file.position.damage

    @property
    def num_bytes_read(self) -> int:
        """The number of bytes of the metrics file that were read so far."""
        return self._file.num_bytes_read

    @property
    def is_live(self) -> bool:
        """Whether the run goes on."""
        return self.summary.status is not None and self.summary.status.is_live

    @property
    def last_seen(self) -> float | None:
        """The time of the last heartbeat in seconds since 1970, or None if there was none."""
        stored: Mapping[str, Any] | None = self._facts.get("status")
        return None if stored is None else stored["updated"]

    @property
    def seconds_per_step(self) -> float | None:
        """The time of a step according to the last log lines, or None if it is unknown."""
        if len(self._recent) < 2:
            return None
        (first_step, begin), (last_step, end) = self._recent[0], self._recent[-1]
        # A clock that went back says nothing about the speed.
        return (end - begin) / (last_step - first_step) if last_step > first_step and end > begin else None

    @property
    def seconds_left(self) -> float | None:
        """The time until the last step, or None if it is unknown or the run does not go on."""
        step, most, each = self.summary.step, self.summary.max_steps, self.seconds_per_step
        if self.summary.status is not Status.RUNNING or step is None or most is None or each is None:
            return None
        return max(0, most - step) * each

    def _restart(self) -> None:
        self.curves, self._last_step, self.restarted = {}, None, self._version
        self.num_events = 0
        self.events.clear()
        self._recent.clear()

    def _read(self) -> bool:
        """Reads what was logged since the last call; returns whether the metrics file has changed."""
        offset = self._file.position.offset
        # A file that does not exist or cannot be read has nothing new.
        with suppress(OSError):
            for record in self._file.records():
                self._take(record)
        return self._file.position.offset != offset or self.restarted == self._version

    def _take(self, record: Record) -> None:
        step = record.get("step")
        if "event" in record:
            self._take_event(record)
            return
        if step is None:
            return
        self._last_step = step
        at = number_of(record.get("time"))
        if at is not None and 0 < at < _LATEST:
            if self._recent and step < self._recent[-1][0]:
                self._recent.clear()
            if not self._recent or step > self._recent[-1][0]:
                self._recent.append((step, at))
        for name, value in numbers_of(record).items():
            curve = self.curves.get(name)
            if curve is None and len(self.curves) < MAX_METRICS:
                curve = self.curves[name] = GrowingCurve()
            if curve is not None:
                curve.add(step, value, self._version)

    def _take_event(self, record: Record) -> None:
        self.num_events += 1
        if number_of(record.get("paused_seconds")) is not None:
            # The time of a pause says nothing about the speed.
            self._recent.clear()
        found = Event.of(record)
        self.events.append(RunEvent(found.step, found.kind, hide(found.text), self.num_events, self._version))
