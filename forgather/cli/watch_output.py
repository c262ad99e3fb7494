"""Watched runs for the terminal: a frame of panels with curves, and single lines where there is no terminal.

The input is `WatchedRuns`; the output is a frame that fits the width and height, or lines, or plain data for JSON.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forgather.cli.character_plot import STYLES, PlottedCurve, plot_lines
from forgather.cli.output import plural
from forgather.cli.source_excerpt import clean
from forgather.run_status import Status
from forgather.runs.growing_curve import GrowingCurve
from forgather.runs.live_run import LiveRun, RunEvent
from forgather.runs.summary import RunSummary, differing
from forgather.runs.watched_runs import Ranking, WatchedRuns

PANEL_COLUMNS = 56
"""The least width of a panel next to another one."""
_MIN_LINES, _MAX_CURVES = 11, 4
"""The least height of a panel, and the greatest number of evaluations in a plot."""
_MAX_PANELS = 8
_MAX_VALUES = 4
_STYLES = {
    Status.RUNNING: "cyan",
    Status.PAUSED: "yellow",
    Status.FINISHED: "green",
    Status.FAILED: "bold red",
    Status.KILLED: "bold red",
    Status.INTERRUPTED: "yellow",
}
_WIDEST = 200
# Shown in a line of their own, or of no interest while a run goes on.
_NOT_LISTED = ("_runtime", "_per_second", "_bytes", "total_flos", "num_input_tokens_seen")
_USUAL = ("loss", "eval_loss", "learning_rate", "grad_norm")


def frame(watched: WatchedRuns, *, width: int, height: int, now: float, is_braille: bool) -> RenderableType:
    """Returns all runs as one frame: a panel for each run whose curves are known, and a table if there is more.

    Args:
        watched: the runs.
        width: the number of columns.
        height: the number of lines that the frame may take; panels that do not fit are left out, and counted.
        now: the current time in seconds since 1970.
        is_braille: whether the output can show Braille characters.
    """
    summaries = watched.summaries()
    runs = [watched.live[run.folder] for run in summaries if run.folder in watched.live]
    runs.sort(key=lambda run: not run.is_live)
    has_table = watched.ranking is not None or len(summaries) > len(runs)
    if not summaries:
        where = ", ".join(os.path.relpath(top) for top in watched.tops)
        return Text(f"no run goes on below {where}; new runs are shown as they start", "dim")
    parts: list[RenderableType] = []
    if watched.ranking is not None and watched.ranking.title:
        parts.append(_head(watched.ranking, summaries, width))
        height -= 1
    room = max(3, height // 3 if runs else height - 3)
    table_lines = min(len(summaries), room) + 2 if has_table else 0
    across = max(1, min(len(runs), width // PANEL_COLUMNS))
    rows = max(1, min(math.ceil(len(runs) / across), (height - table_lines - 1) // _MIN_LINES))
    shown = runs[: min(_MAX_PANELS, rows * across)]
    if has_table:
        parts.append(_table(watched, summaries[: table_lines - 2], width, len(summaries)))
    titles = titles_of(watched)
    if shown:
        across = min(across, len(shown))
        lines = (height - table_lines - 1) // max(1, math.ceil(len(shown) / across))
        parts.append(_panels(shown, titles, across, width, max(_MIN_LINES, lines), now, is_braille=is_braille))
    left_out = len(runs) - len(shown)
    if left_out:
        parts.append(Text(f"{left_out} more without room for a panel: name runs to see them", "dim"))
    return Group(*parts)


def _head(ranking: Ranking, runs: Sequence[RunSummary], width: int) -> Text:
    """Returns how far a sweep is, in one line."""
    counts = Counter(str(run.status or "unknown") for run in runs)
    waiting = ranking.num_trials - len(runs)
    words = [f"{count} {status}" for status, count in counts.items()] + ([f"{waiting} to start"] if waiting > 0 else [])
    head = Text.assemble((ranking.title, "bold"), f"  {max(ranking.num_trials, len(runs))} trials: {', '.join(words)}")
    head.truncate(width, overflow="ellipsis")
    return head


def titles_of(watched: WatchedRuns) -> dict[str, str]:
    """Returns what runs are called, by folder: a trial by its number and the values in which it differs.

    Args:
        watched: the runs.
    """
    runs = watched.summaries()
    if watched.ranking is None:
        names = Counter(run.name for run in runs)
        return {run.folder: run.name if names[run.name] == 1 else _label(run, watched.tops) for run in runs}
    paths = differing(runs, _MAX_VALUES)
    return {
        run.folder: " · ".join(
            [_label(run, watched.tops)]
            + [f"{path.rpartition('.')[2]} {run.changes[path]}" for path in paths if path in run.changes]
        )
        for run in runs
    }


def _panels(
    runs: Sequence[LiveRun],
    titles: Mapping[str, str],
    across: int,
    width: int,
    height: int,
    now: float,
    *,
    is_braille: bool,
) -> RenderableType:
    grid = Table.grid(expand=False)
    each = width // across
    for _ in range(across):
        grid.add_column(width=each)
    panels = [_panel(run, titles[run.folder], each, height, now, is_braille=is_braille) for run in runs]
    for at in range(0, len(panels), across):
        grid.add_row(*panels[at : at + across])
    return grid


def _panel(run: LiveRun, name: str, width: int, height: int, now: float, *, is_braille: bool) -> Panel:
    """Returns a panel of one run, at most `height` lines high."""
    inner = width - 4
    summary = run.summary
    head: list[Text] = [_progress(run, inner, now, is_braille=is_braille), _figures(run)]
    tail = [_metrics_line(run, inner)]
    events = [_event_line(event, inner) for event in list(run.events)[-3:]]
    if run.num_damaged:
        told = f"! metrics.jsonl: {plural(run.num_damaged, 'damaged line')} left out: {run.damage}"
        events.append(Text(clean(told, inner), "yellow"))
    if summary.cause and not run.is_live:
        events.append(Text(clean(summary.cause, inner), "red"))
    events += [Text(clean(f"! {problem}", inner), "yellow") for problem in summary.problems]
    curves = _curves(run)
    room = height - 2 - len(head) - len(tail) - len(events) - 2
    plot = plot_lines(curves, width=inner, height=max(2, room), label=_number, is_braille=is_braille)
    legend = Text("  ").join(
        Text(f"{'━' if is_braille else '-'} {curve.name}", STYLES[number % len(STYLES)])
        for number, curve in enumerate(curves)
    )
    legend.truncate(inner)
    body = [*head, *((legend, *plot) if plot else (Text("nothing logged yet", "dim"),)), *tail, *events]
    status = "unknown" if summary.status is None else str(summary.status)
    style = _STYLES.get(summary.status, "yellow") if summary.status is not None else "yellow"
    title = Text.assemble((clean(name, max(8, inner - len(status) - 6)), "bold"), "  ", (status, style))
    from rich import box

    return Panel(Group(*body), title=title, title_align="left", width=width, border_style="dim",
                 box=box.ROUNDED if is_braille else box.ASCII)  # fmt: skip


def _progress(run: LiveRun, width: int, now: float, *, is_braille: bool) -> Text:
    """Returns the step, a bar, and the time that is left or when the run was last seen."""
    step, most = run.summary.step, run.summary.max_steps
    count = f"step {_count(step)}" + (f"/{most:,}" if most else "")
    if run.seconds_left is not None:
        note = f"{_format('format_duration')(run.seconds_left)} left"
    elif run.summary.status is Status.KILLED and run.last_seen is not None:
        note = f"last seen {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(run.last_seen))}"
    else:
        note = ""
    room = width - len(count) - len(note) - 4
    if not most or step is None or room < 6:
        return Text(f"{count}  {note}".rstrip())
    done = min(room, round(room * step / most))
    full, empty = ("━", "─") if is_braille else ("#", "-")
    return Text.assemble(count, "  ", (full * done, "cyan"), (empty * (room - done), "dim"), "  ", (note, "bold"))


def _figures(run: LiveRun) -> Text:
    """Returns the speed, the memory and the time so far."""
    parts = []
    last = run.summary.metrics
    for name, unit in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if (speed := last.get(name)) is not None:
            parts.append(f"{_format('format_count')(speed)} {unit}")
    if (each := run.seconds_per_step) is not None:
        parts.append(f"{each:.3g} s/step")
    peak = last.get("memory_peak_bytes") or last.get("memory_bytes")
    if peak is not None and math.isfinite(peak):
        parts.append(f"{_format('format_bytes')(peak)} memory")
    if run.summary.seconds is not None:
        parts.append(f"running {_format('format_duration')(run.summary.seconds)}" if run.is_live else
                     f"ran {_format('format_duration')(run.summary.seconds)}")  # fmt: skip
    return Text("  ·  ".join(parts), "dim", overflow="ellipsis", no_wrap=True)


def _metrics_line(run: LiveRun, width: int) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for name in _listed(run.summary.metrics):
        text.append(f"{clean(name, 40)} ", "dim").append(f"{_number(run.summary.metrics[name])}  ")
    text.truncate(width, overflow="ellipsis")
    return text


def _listed(metrics: Iterable[str]) -> list[str]:
    names = [name for name in metrics if not name.endswith(_NOT_LISTED) and name not in ("mfu",)]
    return sorted(names, key=lambda name: (_USUAL.index(name) if name in _USUAL else len(_USUAL), name))


def _event_line(event: RunEvent, width: int) -> Text:
    at = "" if event.step is None else f"step {event.step:,}: "
    return Text.assemble(("! ", "bold yellow"), clean(f"{at}{event.kind}: {event.text}", width - 2))


def _curves(run: LiveRun) -> list[PlottedCurve]:
    """Returns the training loss and the losses of evaluations; without any loss, the first metric."""
    names = ["loss"] if "loss" in run.curves else []
    evaluated = [name for name in run.curves if name.startswith("eval_") and name.endswith("loss")]
    names += evaluated[:_MAX_CURVES]
    names = names or _listed(run.curves)[:1]
    return [PlottedCurve(clean(name, 40), points_of(run.curves[name])) for name in names]


def points_of(curve: GrowingCurve) -> list[tuple[int, float]]:
    """Returns the finite extremes of each bucket, in the order of their steps."""
    found: list[tuple[int, float]] = []
    for bucket in curve.buckets:
        if math.isfinite(bucket.lowest):
            found += sorted({(bucket.lowest_step, bucket.lowest), (bucket.highest_step, bucket.highest)})
    return found


def _table(watched: WatchedRuns, runs: Sequence[RunSummary], width: int, count: int) -> Table:
    """Returns a table of runs with the values that differ between them."""
    ranking = watched.ranking
    metric = f"best {ranking.metric}" if ranking is not None else "best"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", width=None, pad_edge=False)
    names = differing(runs)
    table.add_column(f"run ({len(runs)} of {count})" if len(runs) < count else "run", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column(clean(metric, 30), justify="right", no_wrap=True)
    room = width - 60
    kept = [name for at, name in enumerate(names[:_MAX_VALUES]) if (at + 1) * 16 <= room]
    for name in kept:
        table.add_column(clean(name.rpartition(".")[2], 24), justify="right", no_wrap=True)
    for number, run in enumerate(runs):
        status = "unknown" if run.status is None else str(run.status)
        table.add_row(
            clean(_label(run, watched.tops), 40),
            Text(status, _STYLES.get(run.status, "yellow") if run.status is not None else "yellow"),
            _count(run.step) + (f"/{run.max_steps:,}" if run.max_steps else ""),
            "-" if run.best is None else _number(run.best.value),
            *(clean(run.changes.get(name, "-"), 24) for name in kept),
            style="bold" if number == 0 and run.best is not None and ranking is not None else "",
        )
    return table


def _label(run: RunSummary, tops: Sequence[str]) -> str:
    """Returns the path of a run without what all runs have in common: the folder and the word `runs`."""
    place = run.folder
    for top in tops:
        relative = os.path.relpath(run.folder, os.path.realpath(top))
        place = place if relative.startswith(os.pardir) else relative
    parts = [part for part in place.split(os.sep) if part not in ("runs", "trials")]
    return parts[0] if len(parts) == 2 and parts[0].isdecimal() else os.sep.join(parts)


def run_line(run: LiveRun, name: str | None) -> str:
    """Returns the state of a run as one line, for output that is no terminal.

    Args:
        run: the run.
        name: what the line calls the run, or None if there is no other one.
    """
    summary = run.summary
    parts = [] if name is None else [f"{name}:"]
    parts.append("unknown" if summary.status is None else str(summary.status))
    parts.append(f"step {_count(summary.step)}" + (f"/{summary.max_steps:,}" if summary.max_steps else ""))
    parts += [f"{name} {_number(summary.metrics[name])}" for name in _listed(summary.metrics)[:_MAX_VALUES]]
    if (speed := summary.metrics.get("tokens_per_second")) is not None:
        parts.append(f"{_format('format_count')(speed)} tokens/s")
    if run.seconds_left is not None:
        parts.append(f"{_format('format_duration')(run.seconds_left)} left")
    if summary.cause and not run.is_live:
        parts.append(summary.cause)
    return clean("  ".join(parts), _WIDEST)


def event_line(event: RunEvent, name: str | None) -> str:
    """Returns an event of a run as one line; `name` is what it calls the run, or None."""
    whose = "" if name is None else f"{name}: "
    at = "" if event.step is None else f"step {event.step:,}: "
    return clean(f"! {whose}{at}{event.kind}: {event.text}", _WIDEST)


def _number(value: float) -> str:
    text: str = _format("format_number")(value)
    return text


def _count(step: int | None) -> str:
    return "-" if step is None else f"{step:,}"


def _format(name: str) -> Any:
    # Resolved by name: the module is of the training tower, and imports nothing of it.
    return getattr(import_module("forgather.ml.number_format"), name)
