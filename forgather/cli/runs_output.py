"""Tables and text about runs for the terminal, and the same facts as CSV.

The input is a `RunTable` or a `RunSummary`; the output is lines with colors, as narrow as the terminal.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from forgather.cli.output import Line, plural
from forgather.cli.palette import styled
from forgather.interventions import Intervention
from forgather.project.path_display import near_path
from forgather.run_status import Status
from forgather.runs.condition import as_text
from forgather.runs.config_values import Value
from forgather.runs.run_table import RunTable
from forgather.runs.summary import RunSummary

_ROLES = {
    Status.RUNNING: "key",
    Status.PAUSED: "warning",
    Status.FINISHED: "good",
    Status.FAILED: "error",
    Status.KILLED: "error",
    Status.INTERRUPTED: "warning",
}
_GAP = "  "
_WIDEST_CELL = 28
_MOST_VALUES = 8
"""The number of values of the config that a table shows where nothing limits its width."""


class _Column(NamedTuple):
    title: str
    cells: list[str]
    is_right: bool = False

    def padded(self) -> list[str]:
        """Returns the title and the cells with the same width."""
        texts = [self.title, *self.cells]
        width = max(map(len, texts))
        return [text.rjust(width) if self.is_right else text.ljust(width) for text in texts]


def table_lines(table: RunTable, top: str, *, width: int | None, most: int | None, now: float) -> list[Line]:
    """Returns a table of runs, a line with their number, and a line for each failure and each problem.

    Args:
        table: the runs.
        top: the folder below which they were found.
        width: the number of columns of the terminal, or None if there is no limit. Columns that do not fit are left
            out, the least important first.
        most: the largest number of runs to show, or None for all.
        now: the current time in seconds since 1970.
    """
    shown = RunTable(table.runs[:most], table.stores)
    columns = _columns(shown, table, top, now)
    kept, left_out = _fitting(columns, width)
    heads = [_GAP.join(cells).rstrip() for cells in zip(*(column.padded() for column in kept), strict=True)]
    lines = [Line(heads[0], lambda line: styled("dim", line))] if len(shown) else []
    for run, text in zip(shown.runs, heads[1:], strict=True):
        lines.append(Line(text, lambda line, run=run: _painted(line, run)))  # type: ignore[misc]
    lines.append(Line(_count_line(table, len(shown), left_out), lambda line: styled("dim", line)))
    for run in shown.runs:
        if run.cause is not None and run.status in (Status.FAILED, Status.KILLED):
            lines.append(Line(f"x {run.name}: {run.cause[:300]}", lambda line: styled("error", line[0]) + line[1:]))
        for problem in (*run.problems, *run.notes):
            lines.append(Line(f"! {run.name}: {problem}", lambda line: styled("warning", line[0]) + line[1:]))
    return lines


def _columns(shown: RunTable, table: RunTable, top: str, now: float) -> list[_Column]:
    """Returns the columns, the most important first."""
    runs = shown.runs
    columns = [
        _Column("run", _labels(runs, top)),
        _Column("status", ["unknown" if run.status is None else str(run.status) for run in runs]),
        _Column("step", [_step(run) for run in runs], is_right=True),
        *_metric_columns(runs),
    ]
    if any(run.config is not None and not _is_in_name(run) for run in runs):
        columns.append(_Column("config", [run.config or "-" for run in runs]))
    differing = table.differing(_MOST_VALUES)
    ends = Counter(column.name.rpartition(".")[2] for column in differing)
    for column in differing:
        end = column.name.rpartition(".")[2]
        values = [table.value(run, column) for run in runs]
        is_right = all(value is None or isinstance(value[0], int | float) for value in values)
        cells = ["-" if value is None else _cell(value[0]) for value in values]
        columns.append(_Column(end if ends[end] == 1 else column.name, cells, is_right))
    duration, count = _format("format_duration"), _format("format_count")
    columns += [
        _Column("started", [_age(run.started, now) for run in runs], is_right=True),
        _Column("time", ["-" if run.seconds is None else duration(run.seconds) for run in runs], is_right=True),
        _Column("tok/s", [count(speed) if (speed := run.tokens_per_second) else "-" for run in runs], is_right=True),
        _Column("group", [run.labels.group or "-" for run in runs]),
        _Column("tags", [",".join(run.labels.tags) or "-" for run in runs]),
        _Column("note", [_cell(run.labels.note) if run.labels.note else "-" for run in runs]),
    ]
    return [column for column in columns if column.title in ("run", "status") or set(column.cells) != {"-"}]


def _format(name: str) -> Any:
    # Resolved by name: the module is of the training tower, and imports nothing of it.
    return getattr(import_module("forgather.ml.number_format"), name)


def _labels(runs: Sequence[RunSummary], top: str) -> list[str]:
    names = Counter(run.name for run in runs)
    return [run.name if names[run.name] == 1 else os.path.relpath(run.folder, top) for run in runs]


def _is_in_name(run: RunSummary) -> bool:
    stem = (run.config or "").removesuffix(".yaml").replace("/", "-")
    return stem in run.name


def _step(run: RunSummary) -> str:
    if run.step is None:
        return "-"
    return f"{run.step}/{run.max_steps}" if run.max_steps else str(run.step)


def _metric_columns(runs: Sequence[RunSummary]) -> list[_Column]:
    """Returns a column with the last and one with the best value of the metric by which models are compared."""
    names = [_compared(run) for run in runs]
    common = {name for name in names if name is not None}
    title = common.pop() if len(common) == 1 else ""
    number = _format("format_number")
    last = [
        "-" if name is None else f"{'' if title else name + ' '}{number(run.metrics[name])}"
        for run, name in zip(runs, names, strict=True)
    ]
    best = ["-" if run.best is None else number(run.best.value) for run in runs]
    return [_Column(title or "metric", last, bool(title)), _Column("best", best, is_right=True)]


def _compared(run: RunSummary) -> str | None:
    named = [run.best.metric] if run.best is not None else []
    return next((name for name in (*named, "eval_loss", "loss", "train_loss") if name in run.metrics), None)


def _age(started: float | None, now: float) -> str:
    """Returns how long ago a time was."""
    if started is None:
        return "-"
    seconds = now - started
    if seconds < -60:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(min(started, 1e11)))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "now"


def _cell(value: Value) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else as_text(value)
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 3]}..."


def _fitting(columns: Sequence[_Column], width: int | None) -> tuple[list[_Column], list[str]]:
    """Returns the columns that fit, and the titles of those that do not."""
    kept: list[_Column] = []
    left_out: list[str] = []
    used = 0
    for column in columns:
        needs = max(map(len, [column.title, *column.cells])) + (len(_GAP) if kept else 0)
        # The two first are needed to know which run is meant, and a terminal wraps what is too long.
        if len(kept) < 2 or width is None or used + needs <= width:
            kept.append(column)
            used += needs
        else:
            left_out.append(column.title)
    return kept, left_out


def _painted(line: str, run: RunSummary) -> str:
    if run.status is None:
        return line
    word = f" {run.status}"
    before, found, after = line.partition(word)
    return f"{before} {styled(_ROLES[run.status], word.strip())}{after}" if found else line


def _count_line(table: RunTable, num_shown: int, left_out: Sequence[str]) -> str:
    counts = Counter("unknown" if run.status is None else str(run.status) for run in table.runs)
    text = f"{plural(len(table), 'run')}: {', '.join(f'{count} {word}' for word, count in counts.most_common())}"
    text = text if counts else "no runs"
    if num_shown < len(table):
        text += f"; {num_shown} shown"
    if left_out:
        text += f"; left out, because the window is narrow: {', '.join(left_out)}"
    return text


def details_lines(run: RunSummary, usage: str, interventions: Sequence[Intervention]) -> list[str]:
    """Returns what is known about one run.

    Args:
        run: the run.
        usage: a description of its disk space.
        interventions: the changes that the user made to it while it went on.
    """
    number = _format("format_number")
    instant = "-" if run.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    best = run.best and f"{run.best.metric} {number(run.best.value)}, at step {run.best.step}"
    rows: dict[str, str | None] = {
        "run": near_path(run.folder),
        "status": "unknown" if run.status is None else str(run.status),
        "cause": run.cause,
        "config": run.config and f"{run.config} of project {run.project!r}",
        "command": run.command,
        "started": instant,
        "time": None if run.seconds is None else _format("format_duration")(run.seconds),
        "step": _step(run),
        "speed": f"{_format('format_count')(speed)} tokens/s" if (speed := run.tokens_per_second) else None,
        "best": best or None,
        "changed": "; ".join(one.text for one in interventions),
        "group": run.labels.group,
        "tags": ", ".join(run.labels.tags),
        "note": run.labels.note,
        "repeats": run.rerun_of,
        "disk": usage,
    }
    lines = [f"{name:<8} {text}" for name, text in rows.items() if text]
    if run.changes:
        width = max(map(len, run.changes))
        lines += ["", "set by the config or the command line:"]
        lines += [f"  {path:<{width}}  {text}" for path, text in run.changes.items()]
    if run.metrics:
        width = max(map(len, run.metrics))
        lines += ["", "last values:"]
        lines += [f"  {name:<{width}}  {number(value)}" for name, value in sorted(run.metrics.items())]
    return lines + [f"! {problem}" for problem in (*run.problems, *run.notes)]


def strict(value: Any) -> Any:
    """Returns plain data in which numbers that are not finite are texts, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows with the same keys as CSV, with a line of titles."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
    for row in rows:
        writer.writerow([json.dumps(cell) if isinstance(cell, bool) else cell for cell in row.values()])
    return stream.getvalue()
