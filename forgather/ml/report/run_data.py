"""The data of a report, read from the files of a run folder.

The input is the folder; the output is a `RunFacts`. A missing file is left out. For a file that cannot be read,
`problems` has a message, because a report must also be possible for a run that was killed. A folder without any record
of a run is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from forgather.errors import TrainingError
from forgather.ml.metrics import METRICS_FILE, read_records, whole_number
from forgather.planner.memory_plan import PLAN_FILE
from forgather.run_status import STATUS_FILE, RunStatus, read_status

RANKS_FILE, OPERATORS_FILE, MEMORY_FILE = "ranks.jsonl", "profile/operators.json", "memory.json"
SAMPLES_FILE, SUMMARY_FILE, RUN_FILE, CONFIG_FILE = "samples.jsonl", "summary.json", "run.json", "config.yaml"
_LONGEST_CONFIG_BYTES = 500_000  # the whole text becomes a part of the page
_MOST_STEPS = 2**53
_MOST_VALUE = 1e300
"""The value from which on one counts as infinite: charts have powers of ten above their values."""
_TABLES = ("model", "arguments", "optimizer", "schedule", "machine", "versions", "places")
_NUMBERS = ("seconds", "tokens_per_second", "samples_per_second")
_LATEST = 1e11
"""Units: seconds since 1970. A later time is damage."""
_NO_METRIC = frozenset({"step", "time", "epoch"})  # they say when a line was logged


class ReportError(TrainingError, ValueError):
    """An error about a folder that does not exist or has no record of a run, so that no report can be written."""

    code = "FG850"


@dataclass(frozen=True)
class Series:
    """The values of one metric.

    Args:
        name: the name of the metric in the log.
        steps: the optimizer steps with a finite value, in ascending order.
        values: the finite values, one for each step.
        num_not_finite: the number of values that were NaN or infinite, which are left out.
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    num_not_finite: int = 0


@dataclass(frozen=True)
class RunFacts:
    """The data of a report.

    Args:
        folder: the folder of the run.
        records: the lines of the metrics file that are logs.
        events: the lines of the metrics file about what happened at a step, such as an anomaly.
        ranks: the lines of `ranks.jsonl`, which `DistributedMonitorCallback` writes.
        operators: the content of `profile/operators.json`, which `ProfileCallback` writes.
        memory: the content of `memory.json`, which `MemoryProfiler` writes.
        samples: the lines of the samples file.
        summary: the content of `summary.json`, which `RunSummaryCallback` writes.
        run: the content of `run.json`, which the launcher writes.
        plan: the content of `plan.json`, the plan that `fgcli train` compared with the device.
        heartbeat: what the run does now according to its heartbeat, or None without one.
        config: the rendered config, or "" if there is none.
        files: the names of the files in the folder.
        problems: a message for each file that could not be read.
    """

    folder: Path
    records: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    summary: dict[str, Any]
    run: dict[str, Any]
    config: str
    files: tuple[str, ...]
    problems: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    operators: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    heartbeat: RunStatus | None = None

    @cached_property
    def series(self) -> dict[str, Series]:
        """The series of each metric, by name.

        If a step has several values of a metric, for example after a resume, the last value is used.
        """
        found: dict[str, dict[float, float]] = {}
        for record in self.records:
            step: Any = record.get("step")
            if not (_is_number(step) and abs(step) < _MOST_STEPS) or "event" in record:
                continue
            for name, value in record.items():
                if name not in _NO_METRIC and _is_number(value):
                    found.setdefault(name, {})[step] = value
        return {name: _series(name, points) for name, points in found.items()}

    def last(self, name: str) -> float | None:
        """Returns the last finite value of a metric, or None if there is none."""
        series = self.series.get(name)
        return series.values[-1] if series and series.values else None

    @property
    def elapsed_seconds(self) -> float:
        """The time from the first log line to the last one, in seconds."""
        times = [at for record in self.records if (at := _instant(record.get("time"))) is not None]
        return times[-1] - times[0] if len(times) > 1 else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the run itself says how it ended: the summary is first written when training starts."""
        return self.summary.get("status") not in (None, "running")

    @property
    def status(self) -> str:
        """What the run does, or how it ended: "running", "killed", "finished" and others.

        A run without a heartbeat that does not say how it ended may go on, or may have been killed.
        """
        if self.is_over or self.heartbeat is None:
            return str(self.summary.get("status", "unknown"))
        return str(self.heartbeat.status)

    @property
    def last_step(self) -> int | None:
        """The last step of the run that any file states, or None."""
        known = [record.get("step") for record in self.records]
        known.append(None if self.heartbeat is None else self.heartbeat.step)
        return _count(self.summary.get("step")) or max((step for one in known if (step := _count(one))), default=None)

    @property
    def max_steps(self) -> int | None:
        """The number of steps of the run, or None if it is unknown."""
        return _count(self.summary.get("max_steps")) or (None if self.heartbeat is None else self.heartbeat.max_steps)

    @property
    def last_seen(self) -> float | None:
        """The time of the last sign of the run in seconds since 1970, or None without one."""
        logged = self.records[-1].get("time") if self.records else None
        signs = [_instant(logged), None if self.heartbeat is None else _instant(self.heartbeat.updated)]
        return max((sign for sign in signs if sign is not None), default=self.started)

    @property
    def started(self) -> float | None:
        """The time at which the training started, in seconds since 1970; None if it is unknown."""
        return _instant(self.summary.get("started"))

    @property
    def planned_peak(self) -> int | None:
        """The peak of the memory of rank 0 in bytes as planned, or None without a plan."""
        try:
            (rank,) = [rank for rank in self.plan["fit"]["ranks"] if rank["ranks"][0] == 0]
            return int(rank["peak_bytes"])
        except (LookupError, TypeError, ValueError):
            return None

    @property
    def planned_seconds(self) -> tuple[float, float] | None:
        """The least and the greatest time of a step in seconds as planned, or None without a plan of times."""
        try:
            seconds = self.plan["time"]["step"]["seconds"]
            low, high = float(seconds["low"]), float(seconds["high"])
        except (LookupError, TypeError, ValueError):
            return None
        return (low, high) if 0 < low <= high < math.inf else None


def read_facts(folder: Path) -> RunFacts:
    """Returns the data of the run in a folder.

    Raises:
        ReportError: FG850 if the folder does not exist or has no record of a run.
    """
    if not folder.is_dir():
        raise ReportError(f"no such folder: {str(folder)!r}", hint="give the folder of a run")
    problems: list[str] = []
    lines = _lines(folder / METRICS_FILE, problems)
    facts = RunFacts(
        folder=folder,
        records=[line for line in lines if "event" not in line],
        events=[line for line in lines if "event" in line],
        ranks=_lines(folder / RANKS_FILE, problems),
        operators=_document(folder / OPERATORS_FILE, problems),
        memory=_document(folder / MEMORY_FILE, problems),
        samples=_lines(folder / SAMPLES_FILE, problems),
        summary=_usable(_document(folder / SUMMARY_FILE, problems)),
        run=_document(folder / RUN_FILE, problems),
        config=_text(folder / CONFIG_FILE, problems),
        files=tuple(sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))),
        problems=problems,
        plan=_document(folder / PLAN_FILE, problems),
        heartbeat=read_status(str(folder)),
    )
    if not (facts.heartbeat or lines or facts.samples or facts.summary or facts.run):
        raise ReportError(
            f"folder {str(folder)!r} holds no record of a run",
            hint=f"expected {METRICS_FILE!r}, {SUMMARY_FILE!r}, {STATUS_FILE!r} or {RUN_FILE!r} in it",
        )
    return facts


def _lines(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        return read_records(file, strict=False)
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{file.name}: {error}")
        return []


def _document(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"), parse_int=whole_number)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} cannot be read: {error}")
        return {}
    if not isinstance(document, dict):
        problems.append(f"{file.name} holds no object")
        return {}
    return document


def _usable(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns a summary without the values of another kind than that of a run: anybody may have written the file."""
    found = {name: value for name, value in summary.items() if name not in _TABLES or isinstance(value, Mapping)}
    found = {name: value for name, value in found.items() if name not in _NUMBERS or _is_finite(value)}
    if (model := found.get("model")) is not None and not _is_finite(model.get("num_parameters", 0)):
        del found["model"]
    return found


def _text(file: Path, problems: list[str]) -> str:
    try:
        if file.stat().st_size > _LONGEST_CONFIG_BYTES:
            problems.append(f"{file.name} is too long to be shown here")
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _series(name: str, points: dict[float, float]) -> Series:
    ordered = sorted((step, value) for step, value in points.items() if abs(value) < _MOST_VALUE)
    return Series(
        name=name,
        steps=[step for step, _ in ordered],
        values=[value for _, value in ordered],
        num_not_finite=len(points) - len(ordered),
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _instant(value: Any) -> float | None:
    return float(value) if _is_number(value) and 0 < value < _LATEST else None


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) < _MOST_VALUE


def _is_number(value: Any) -> bool:
    # `bool` is a subclass of `int`, and a damaged file may contain anything.
    return isinstance(value, int | float) and not isinstance(value, bool)
