"""A comparison of runs as tables for the terminal, and as plain data for JSON.

The input is a `Comparison`; the output is lines. The result in words comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import Any

from forgather.cli.output import Line
from forgather.cli.palette import styled
from forgather.runs.comparison import Comparison, distinct
from forgather.runs.differences import Differing
from forgather.runs.verdict import number_text, verdict_of

_WIDTH = 120
_WIDEST_VALUE = 24
_NAMED_RUNS = 3
_MOST_REASONS = 6
_KINDS = {"code": "code", "version": "versions", "data": "data", "hardware": "hardware"}


def comparison_lines(comparison: Comparison, width: int | None) -> list[Line]:
    """Returns a comparison as lines for the terminal.

    Args:
        comparison: the comparison.
        width: the width of the terminal in columns; None if the output is not a terminal.
    """
    room = width or _WIDTH
    lines = [*_verdict_lines(comparison), Line(""), *_runs(comparison, room)]
    if comparison.has_seeds:
        lines += [Line(""), *_seeds(comparison, room)]
    lines += [Line(""), *_metrics(comparison, room), Line(""), *_config(comparison, room), *_facts(comparison, room)]
    return lines


def _verdict_lines(comparison: Comparison) -> Iterator[Line]:
    verdict = verdict_of(comparison)
    if verdict.winner:
        head = f"{verdict.winner} is best: {verdict.result}"
        yield Line(head, lambda line: line.replace(verdict.winner, styled("good", verdict.winner), 1))
    else:
        yield Line(verdict.result, _strong)
    for reason in verdict.reasons[:_MOST_REASONS]:
        places = " instead of ".join(
            f"{value} ({place})" if place else value
            for value, place in ((reason.value, reason.place), (reason.other, reason.other_place))
        )
        yield Line(f"  {reason.name}: {places}", _key, 4)
    if len(verdict.reasons) > _MOST_REASONS:
        yield Line(f"  and {len(verdict.reasons) - _MOST_REASONS} more values, see below")
    if verdict.cause:
        yield Line(f"  {verdict.cause}")
    if verdict.influence:
        yield Line(verdict.influence)
    for note in verdict.notes:
        yield Line(note, _dim)


def _runs(comparison: Comparison, width: int) -> list[Line]:
    settings = [row for row in comparison.config if not row.is_label and comparison.leader(row) is None]
    name = comparison.choice.name if comparison.choice else None
    before, middle, after = [["", "run"]], [[row.short_name for row in settings]], [["status", "steps"]]
    measured = [["best", "at step", "last"] if name else []]
    for place, at in enumerate(comparison.ranking, start=1):
        run = comparison.runs[at]
        before.append([str(place) if comparison.chosen_best(at) else "-", comparison.labels[at]])
        middle.append([_brief(value.text) if (value := row.values[at]) else "-" for row in settings])
        measured.append([*_best(comparison, at, name), _last(comparison, at, name)] if name else [])
        after.append([run.status, _steps(run.last_step, run.max_steps)])
    table = [[*one, *two, *three, *four] for one, two, three, four in zip(before, middle, measured, after, strict=True)]
    # As many values as fit: all of them are in the table of the config.
    for at in range(len(before[0]) + len(settings) - 1, len(before[0]) - 1, -1):
        if sum(max(map(len, column)) + 3 for column in zip(*table, strict=True)) > width:
            table = [row[:at] + row[at + 1 :] for row in table]
    numbers = {"", "best", "at step", "last", "steps"}
    winner = comparison.labels[comparison.ranking[0]] if name else ""
    title = [Line(f"Runs by {name}, the best one first", _strong)] if name else []
    return [*title, *_table(table[0], table[1:], width, numbers, winner)]


def _brief(text: str) -> str:
    """Returns a value for a narrow column: of a constructor, the name without its module."""
    last = text.rpartition(":")[2] if " " not in text else text
    return last if len(last) <= _WIDEST_VALUE else f"{last[: _WIDEST_VALUE - 3]}..."


def _best(comparison: Comparison, at: int, name: str) -> tuple[str, str]:
    found = comparison.best(at, name)
    return (number_text(found[0]), f"{found[1]:,}") if found else ("-", "-")


def _last(comparison: Comparison, at: int, name: str) -> str:
    last = comparison.runs[at].last(name)
    return "-" if last is None else number_text(last[0] if last[0] is not None else math.nan)


def _steps(step: int | None, most: int | None) -> str:
    if step is None:
        return "-"
    return f"{step:,}" if most in (None, step) else f"{step:,} of {most:,}"


def _seeds(comparison: Comparison, width: int) -> list[Line]:
    rows = [
        [
            group.label,
            str(len(group.runs)),
            number_text(group.mean) if group.mean is not None else "-",
            f"± {number_text(group.deviation)}" if group.deviation is not None else "-",
        ]
        for group in comparison.groups
    ]
    name = comparison.choice.name if comparison.choice else "value"
    heads = ["config", "seeds", f"mean of best {name}", "deviation"]
    return _table(heads, rows, width, set(heads[1:]), comparison.groups[0].label)


def _metrics(comparison: Comparison, width: int) -> list[Line]:
    """Returns the best and the last values of each metric, with the run that has the best one."""
    rows = []
    for name in comparison.metrics:
        direction = comparison.direction(name)
        bests = [(best[0], at, best[1]) for at in range(len(comparison.runs)) if (best := comparison.best(at, name))]
        lasts = [last[0] for run in comparison.runs if (last := run.last(name)) and last[0] is not None]
        span = "-" if not lasts else number_text(lasts[0])
        if len(set(lasts)) > 1:
            span = f"{number_text(min(lasts))} to {number_text(max(lasts))}"
        if bests:
            value, at, step = (max if direction else min)(bests, key=lambda best: best[0])
            rows.append([name, number_text(value), f"{step:,}", comparison.labels[at], span])
        else:
            rows.append([name, "-", "-", "-", span])
    heads = ["metric", "best", "at step", "of run", "last values of all runs"]
    return _table(heads, rows, width, {"best", "at step"})


def _config(comparison: Comparison, width: int) -> list[Line]:
    rows = [row for row in comparison.config if not row.is_label]
    if not rows:
        return [Line("No value of the config differs.")]
    cells = [line for row in rows for line in _values(comparison, row, comparison.leader(row))]
    return _table(["config value", "is", "set by", "in"], cells, width)


def _values(comparison: Comparison, row: Differing, leader: Differing | None) -> Iterator[list[str]]:
    name, with_leader = row.name, f"as {leader.name}" if leader else ""
    for members in distinct(row).values():
        value = row.values[members[0]]
        places = dict.fromkeys(other.place for at in members if (other := row.values[at]) is not None and other.place)
        runs = with_leader if leader else _named(comparison, members)
        yield [name, value.text if value else "not set", ", ".join(places), runs]
        name = with_leader = ""


def _named(comparison: Comparison, members: Sequence[int]) -> str:
    labels = [comparison.labels[at] for at in comparison.ranking if at in members]
    more = f" and {len(labels) - _NAMED_RUNS} more" if len(labels) > _NAMED_RUNS else ""
    return ", ".join(labels[:_NAMED_RUNS]) + more


def _facts(comparison: Comparison, width: int) -> list[Line]:
    same = [word for kind, word in _KINDS.items() if not any(row.kind == kind for row in comparison.facts)]
    rows = []
    for row in comparison.facts:
        head = [row.kind, row.name]
        for members in distinct(row).values():
            value = row.values[members[0]]
            rows.append([*head, value.text if value else "none", _named(comparison, members)])
            head = ["", ""]
    found = [Line(""), *_table(["kind", "name", "is", "in"], rows, width)] if rows else []
    words = ", ".join(same[:-1]) + (" and " if len(same) > 1 else "") + same[-1] if same else ""
    return [*found, *([Line(""), Line(f"The same in all runs: {words}.", _dim)] if same else [])]


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], width: int, numbers: set[str] | None = None, winner: str = ""
) -> list[Line]:
    """Returns a table as lines that fit the width; the row of the winner is green."""
    # Late imports: rich takes longer than the commands that have no tables.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for head in heads:
        table.add_column(Text(head), justify="right" if head in (numbers or ()) else "left", overflow="fold")
    for row in rows:
        # Names of runs are texts of users, in which brackets are no markup.
        table.add_row(*map(Text, row))
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in text.rstrip("\n").split("\n")]
    return [
        Line(
            line,
            _strong
            if at == 0
            else _dim
            if at == 1
            else _good
            if winner and f" {winner} " in f" {line} " and at == 2
            else None,
            0,
        )
        for at, line in enumerate(lines)
    ]


def _strong(line: str) -> str:
    return styled("strong", line)


def _dim(line: str) -> str:
    return styled("dim", line)


def _good(line: str) -> str:
    return styled("good", line)


def _key(line: str) -> str:
    name, colon, rest = line.partition(":")
    return f"{styled('key', name)}{colon}{rest}"


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as plain data, without the points of the curves."""
    verdict = verdict_of(comparison)
    choice = comparison.choice
    return {
        "metric": vars(choice) if choice else None,
        "best": verdict.winner or None,
        "result": verdict.result,
        "influence": verdict.influence or None,
        "reasons": [vars(reason) for reason in verdict.reasons],
        "notes": list(verdict.notes),
        "runs": [_run_fact(comparison, at) for at in comparison.ranking],
        "groups": [
            {
                "label": group.label,
                "runs": [comparison.runs[at].folder for at in group.runs],
                "mean": group.mean,
                "deviation": group.deviation,
            }
            for group in comparison.groups
        ],
        "differences": [
            {
                "kind": row.kind,
                "name": row.name,
                "is_seed": row.is_seed,
                "values": {
                    run.folder: value and {"text": value.text, "place": value.place}
                    for run, value in zip(comparison.runs, row.values, strict=True)
                },
            }
            for row in (*comparison.config, *comparison.facts)
        ],
    }


def _run_fact(comparison: Comparison, at: int) -> dict[str, Any]:
    run = comparison.runs[at]
    metrics = {}
    for name in run.curves.metrics:
        best, last, curve = comparison.best(at, name), run.last(name), run.curve(name)
        metrics[name] = {
            "best": best[0] if best else None,
            "best_step": best[1] if best else None,
            "last": last[0] if last else None,
            "last_step": last[1] if last else None,
            "not_finite": curve.num_gaps if curve else 0,
        }
    return {
        "folder": run.folder,
        "label": comparison.labels[at],
        "config": run.config,
        "status": run.status,
        "step": run.last_step,
        "max_steps": run.max_steps,
        "attempts": [one.folder for one in run.earlier],
        "interventions": [one.text for part in (*run.earlier, run) for one in part.interventions],
        "damaged_lines": run.curves.position.num_damaged,
        "metrics": metrics,
    }
