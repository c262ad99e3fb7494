"""`RunTable`: many runs with named values, which can be filtered, sorted and listed.

The input is a folder; the output is rows of plain values. A name is that of a column, of a metric, or a path in the
config; the end of a path is enough if it names one value.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from forgather.errors import ProjectError, closest
from forgather.runs.condition import Condition, as_text
from forgather.runs.config_values import Value, plain_value
from forgather.runs.fact_store import FactStore
from forgather.runs.run_folders import find_runs
from forgather.runs.summary import RunSummary, summary_of, tells_apart
from forgather.spelling import close_matches

_METRICS = "metrics."


def _instant(run: RunSummary) -> Value:
    if run.started is None or not 0 <= run.started < 1e11:
        return None
    return datetime.fromtimestamp(run.started, UTC).isoformat(timespec="seconds")


_COLUMNS: dict[str, Callable[[RunSummary], Value]] = {
    "run": lambda run: run.name,
    "folder": lambda run: run.folder,
    "project": lambda run: run.project,
    "config": lambda run: run.config,
    "started": _instant,
    "status": lambda run: None if run.status is None else str(run.status),
    "cause": lambda run: run.cause,
    "step": lambda run: run.step,
    "max_steps": lambda run: run.max_steps,
    "seconds": lambda run: run.seconds,
    "tokens_per_second": lambda run: run.tokens_per_second,
    "best": lambda run: None if run.best is None else run.best.value,
    "best_metric": lambda run: None if run.best is None else run.best.metric,
    "best_step": lambda run: None if run.best is None else run.best.step,
    "group": lambda run: run.labels.group,
    "tags": lambda run: ",".join(run.labels.tags) or None,
    "note": lambda run: run.labels.note,
}
_OTHER_NAMES = {"time": "seconds", "when": "started", "tokens/s": "tokens_per_second", "tag": "tags", "name": "run"}


@dataclass(frozen=True)
class Column:
    """A named value of runs.

    Args:
        name: the full name.
        kind: "column", "metric" or "path".
    """

    name: str
    kind: str


class RunTable:
    """The runs below some folders.

    Args:
        runs: the runs.
        stores: the facts of each run's folder, by the run's folder.
    """

    def __init__(self, runs: Sequence[RunSummary], stores: dict[str, FactStore]) -> None:
        self.runs = list(runs)
        self._all = tuple(runs)
        self.stores = stores

    def __len__(self) -> int:
        return len(self.runs)

    def save(self) -> None:
        """Writes what was read into the cache."""
        for store in {id(store): store for store in self.stores.values()}.values():
            store.save()

    def value(self, run: RunSummary, column: Column) -> tuple[Value] | None:
        """Returns the value of a run in a tuple of one; None if the run has no such value."""
        if column.kind == "metric":
            found = run.metrics.get(column.name)
            return None if found is None else (found,)
        if column.kind == "column":
            value = _COLUMNS[column.name](run)
            return None if value is None else (value,)
        text = run.changes.get(column.name)
        # A long value, or that of a container, is not recorded as it is.
        if text is not None and not text.endswith(("...", ")", "]", "}")) and text[:1] not in "!*&":
            return (plain_value(text),)
        return self.stores[run.folder].value(run.folder, column.name)

    def column(self, name: str) -> Column:
        """Returns the column of a name.

        Args:
            name: the name of a column or of a metric, a path in the config, or the end of one.

        Raises:
            ProjectError: FG501 if there is no such name, or if it names several values.
        """
        known = _OTHER_NAMES.get(name, name)
        if known in _COLUMNS:
            return Column(known, "column")
        metrics = {metric for run in self.runs for metric in run.metrics}
        if name.startswith(_METRICS) and name.removeprefix(_METRICS) in metrics:
            return Column(name.removeprefix(_METRICS), "metric")
        paths = self._paths()
        if name in paths:
            return Column(name, "path")
        found = [Column(name, "metric")] if name in metrics else []
        found += [Column(path, "path") for path in sorted(paths) if path.endswith(f".{name}")]
        if not found and any(self.stores[run.folder].value(run.folder, name) for run in self._samples()):
            return Column(name, "path")  # a path through an alias
        if len(found) == 1:
            return found[0]
        raise _unknown(name, found, [*_COLUMNS, *_OTHER_NAMES, *metrics, *paths])

    def _paths(self) -> set[str]:
        changed = {path for run in self.runs for path in run.changes}
        return changed.union(*(self.stores[run.folder].graph(run.folder).paths() for run in self._samples()))

    def _samples(self) -> list[RunSummary]:
        """Returns one run of each config: the others have the same paths, but for their own changes."""
        known = [run for run in reversed(self.runs) if self.stores[run.folder].has_graph(run.folder)]
        return list({(run.project, run.config): run for run in known}.values())

    def where(self, conditions: Iterable[Condition]) -> dict[str, int]:
        """Keeps the runs that fulfill all conditions.

        Returns:
            The number of runs that were left out because they lack a value, by the name of the value.

        Raises:
            ProjectError: FG501 if a name is unknown or names several values; FG502 if its values have no order with
                an operand.
        """
        lacking: Counter[str] = Counter()
        for condition in conditions:
            column = self.column(condition.name) if self.runs else Column(condition.name, "column")
            kept = []
            is_duration = column.name == "seconds"
            values = [self.value(run, column) for run in self.runs]
            condition.refuse_unordered([value[0] for value in values if value is not None], is_duration=is_duration)
            for run, value in zip(self.runs, values, strict=True):
                if column.name == "tags":
                    kept += [run] if _fits_tags(condition, run.labels.tags) else []
                elif value is None:
                    lacking[column.name] += 1
                elif condition.fits(value[0], is_duration=is_duration):
                    kept.append(run)
            self.runs = kept
        return dict(lacking)

    def sort(self, key: str) -> None:
        """Sorts the runs; those without the value come last.

        Args:
            key: the name of a value, after a minus sign for the greatest first.

        Raises:
            ProjectError: FG501 if the name is unknown or names several values.
        """
        if not self.runs:
            return
        column = self.column(key.removeprefix("-"))
        ranked = [(run, _rank(self.value(run, column))) for run in self.runs]
        known = [pair for pair in ranked if pair[1] is not None]
        known.sort(key=lambda pair: pair[1] or (), reverse=key.startswith("-"))
        self.runs = [run for run, _ in known] + [run for run, rank in ranked if rank is None]

    def differing(self, most: int | None = None) -> list[Column]:
        """Returns the paths of the config whose values differ between the runs.

        Paths that more runs set come first.

        Args:
            most: the largest number of paths, or None for all.
        """
        return self._differing(self.runs, most)

    def _differing(self, runs: Sequence[RunSummary], most: int | None) -> list[Column]:
        count = Counter(path for run in runs for path in run.changes)
        found: list[Column] = []
        for path, _ in sorted(count.items(), key=lambda item: (-item[1], item[0])):
            if len(runs) < 2 or len(found) == most:
                break
            column = Column(path, "path")
            if self._differs(runs, column):
                found.append(column)
        return found

    def _differs(self, runs: Sequence[RunSummary], column: Column) -> bool:
        values = (self.value(run, column) for run in runs)
        return tells_apart(column.name, (None if value is None else as_text(value[0]) for value in values))

    def records(self) -> list[dict[str, Any]]:
        """Returns each run as plain data, with the values of the config that differ between the runs.

        They differ between all runs below the folders, so that a filter does not change which values there are.
        """
        columns = self._differing(self._all, None)
        return [self._record(run, columns) for run in self.runs]

    def _record(self, run: RunSummary, columns: Sequence[Column]) -> dict[str, Any]:
        record: dict[str, Any] = {name: read(run) for name, read in _COLUMNS.items()}
        record["tags"] = list(run.labels.tags)
        record["metrics"] = dict(run.metrics)
        values = {column.name: self.value(run, column) for column in columns}
        record["values"] = {name: None if value is None else value[0] for name, value in values.items()}
        record["problems"] = [*run.problems, *run.notes]
        return record

    def rows(self) -> list[dict[str, Any]]:
        """Returns each run as a flat row: the columns, then metrics by name, then values of the config by path.

        All rows have the same keys in the same order. A metric with the name of a column is `metrics.NAME`.
        """
        records = self.records()
        metrics = dict.fromkeys(name for record in records for name in record["metrics"])
        rows = []
        for record in records:
            row = {name: record[name] for name in _COLUMNS} | {"tags": ",".join(record["tags"]) or None}
            row |= {(_METRICS + name if name in _COLUMNS else name): record["metrics"].get(name) for name in metrics}
            rows.append(row | record["values"])
        return rows


def read_table(folders: Sequence[str], *, now: float | None = None) -> RunTable:
    """Returns the runs below some folders, the newest first.

    Args:
        folders: the folders.
        now: the current time in seconds since 1970, or None to ask the clock.

    Raises:
        ProjectError: FG500 if a folder does not exist or is too large to be searched.
    """
    instant = time.time() if now is None else now
    runs: dict[str, RunSummary] = {}
    stores: dict[str, FactStore] = {}
    for folder in folders:
        found = find_runs(folder)
        store = FactStore(os.path.realpath(folder), found, instant)
        stores |= {run.folder: store for run in found}
        runs |= {run.folder: summary_of(run.folder, store.facts(run.folder), instant) for run in found}
    return RunTable(sorted(runs.values(), key=lambda run: (run.started or 0.0, run.name), reverse=True), stores)


def _fits_tags(condition: Condition, tags: Sequence[str]) -> bool:
    if condition.operator == "!=":
        return condition.operand not in tags
    return any(condition.fits(tag) for tag in tags)


def _rank(value: tuple[Value] | None) -> tuple[int, Any] | None:
    """Returns the sort key of a value: numbers before texts; None for a value that has no order."""
    if value is None or value[0] is None or (isinstance(value[0], float) and math.isnan(value[0])):
        return None
    is_text = isinstance(value[0], str)
    return int(is_text), value[0] if is_text else float(value[0])


def _unknown(name: str, found: Sequence[Column], names: Iterable[str]) -> ProjectError:
    if found:
        words = [f"metrics.{one.name}" if one.kind == "metric" else one.name for one in found]
        return ProjectError(
            f"{name!r} names {len(found)} values", code="FG501", hint=f"say which: {', '.join(words[:8])}"
        )
    every = list(dict.fromkeys(names))
    ends = {path.rpartition(".")[2]: path for path in every}
    near = close_matches(name, every) or [ends[end] for end in close_matches(name.rpartition(".")[2], list(ends))]
    best = closest(name, every)
    near = list(dict.fromkeys([*([best] if best else []), *near]))
    return ProjectError(
        f"no run has {name!r}: neither a column, nor a metric, nor a path of a config",
        code="FG501",
        hint=f"did you mean {', '.join(map(repr, near[:3]))}?" if near else "'fgcli runs --json' lists what there is",
    )
