"""The page of a comparison: its content as plain data, and the HTML document.

The input is a `Comparison`; the output is a structure of lists, dicts, strings and numbers, and the document that
embeds this structure. The page loads nothing from the network or from files. The points of the curves are embedded as
binary numbers in base64, because as text they would take twice as many bytes.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgather.codegen.page.page import embedded
from forgather.redaction import hide, known_hidden
from forgather.runs.compared_run import ComparedRun
from forgather.runs.comparison import Comparison, distinct
from forgather.runs.curve import MAX_BUCKETS, Curve, Steps, Values
from forgather.runs.differences import Differing, file_changes
from forgather.runs.metric_choice import is_cost
from forgather.runs.verdict import Verdict, verdict_of

_SMALLEST, _LARGEST = 1e-37, 3e38
"""The range of numbers that 32 bits represent with seven digits."""
_DELTA_BYTES = (1, 2, 4, 8)


def page_data(comparison: Comparison, *, is_full: bool = False) -> dict[str, Any]:
    """Returns the data of the page.

    Args:
        comparison: the comparison.
        is_full: whether every point is embedded.
    """
    buckets = None if is_full else MAX_BUCKETS
    texts = {
        "verdict": _verdict_facts(verdict_of(comparison)),
        "metric": comparison.choice.name if comparison.choice else None,
        "metrics": [
            {"name": name, "higher": comparison.direction(name), "cost": is_cost(name)} for name in comparison.metrics
        ],
        "runs": [_run_facts(comparison, at) for at in range(len(comparison.runs))],
        "groups": [
            {"label": group.label, "runs": group.runs, "mean": group.mean, "deviation": group.deviation}
            for group in comparison.groups
        ],
        "ranking": comparison.ranking,
        "table": [
            [_metric_facts(comparison, at, name) for name in comparison.metrics] for at in range(len(comparison.runs))
        ],
        "config": [_row_facts(row) | {"follows": comparison.leader(row) is not None} for row in comparison.config],
        "facts": [_row_facts(row) for row in comparison.facts],
    }
    shown: dict[str, Any] = known_hidden(texts)
    return shown | {"curves": [_curves(run, comparison.metrics, buckets) for run in comparison.runs]}


def _verdict_facts(verdict: Verdict) -> dict[str, Any]:
    return {**vars(verdict), "reasons": [vars(reason) for reason in verdict.reasons]}


def _run_facts(comparison: Comparison, at: int) -> dict[str, Any]:
    run = comparison.runs[at]
    return {
        "label": comparison.labels[at],
        "name": run.name,
        "config": run.config,
        "folder": run.folder,
        "status": run.status,
        "started": run.run.facts.get("started"),
        "command": run.run.facts.get("command"),
        "step": run.last_step,
        "max": run.max_steps,
        "parameters": run.table("model").get("num_parameters"),
        "events": [[event.step, event.kind, event.text] for event in run.curves.events],
        "num_events": run.curves.num_events,
        "paused": run.curves.paused_seconds,
    }


def _metric_facts(comparison: Comparison, at: int, name: str) -> list[Any] | None:
    """Returns the best value, its step, the last value, its step, and the number of values that are not finite."""
    run = comparison.runs[at]
    curve, last = run.curve(name), run.last(name)
    if curve is None or last is None:
        return None
    return [*(comparison.best(at, name) or (None, None)), *last, curve.num_gaps]


def _row_facts(row: Differing) -> dict[str, Any]:
    values = []
    for members in distinct(row).values():
        value = row.values[members[0]]
        # Equal values can be set by different lines.
        places = dict.fromkeys(other.place for at in members if (other := row.values[at]) is not None and other.place)
        shown = [] if row.kind == "code" else list(places)
        values.append({"text": value.text if value else None, "places": shown, "runs": members})
    facts: dict[str, Any] = {"kind": row.kind, "name": row.name, "values": values}
    if row.kind == "config":
        facts |= {"short": row.short_name, "seed": row.is_seed, "label": row.is_label, "also": row.also}
        facts["numbers"] = [value.number if value else None for value in row.values]
    if row.kind == "code":
        facts["changes"] = file_changes(row)
    return facts


def _curves(run: ComparedRun, metrics: Sequence[str], buckets: int | None) -> dict[str, Any]:
    reduced = [curve and curve.reduced(buckets) for curve in map(run.curve, metrics)]
    seconds, tokens = run.curves.seconds(buckets), run.curves.num_tokens
    return {
        "metrics": [curve and _curve_facts(curve) for curve in reduced],
        "time": seconds and _points(*seconds),
        "tokens": tokens and _points(*tokens.reduced(buckets).points()),
    }


def _curve_facts(curve: Curve) -> dict[str, Any]:
    facts: dict[str, Any] = {"count": curve.count, **_points(*curve.points())}
    if curve.width > 1:
        facts |= {"width": curve.width, "means": _points(*curve.means())}
    if curve.num_gaps:
        facts |= {"gaps": curve.gaps, "numGaps": curve.num_gaps}
    return facts


def _points(steps: Steps, values: Values) -> dict[str, Any]:
    deltas, sizes = np.diff(steps, prepend=0), np.abs(values)
    size = next(size for size in _DELTA_BYTES if deltas.max(initial=0) < 256**size)
    is_small = ((sizes == 0) | ((_SMALLEST < sizes) & (sizes < _LARGEST))).all()
    return {
        "size": size,
        "steps": b64encode(deltas.astype(f"<u{size}").tobytes()).decode(),
        "bits": 32 if is_small else 64,
        "values": b64encode(values.astype("<f4" if is_small else "<f8").tobytes()).decode(),
    }


_HERE = Path(__file__).parent
# The files are joined to one script in this order: each file uses only definitions of the files before it.
SCRIPTS = (
    "dom.js",
    "model.js",
    "marks.js",
    "chart.js",
    "panels.js",
    "table.js",
    "values.js",
    "differences.js",
    "main.js",
)
_LIBRARY = ("uPlot.iife.min.js", "uPlot.LICENSE")


def page(data: dict[str, Any], title: str) -> str:
    """Returns the HTML document for the data of `page_data`, without secrets.

    Args:
        data: the data.
        title: the title of the document.
    """
    script, licence = map(_read, _LIBRARY)
    texts = {name: value for name, value in data.items() if name != "curves"}
    parts = {
        "title": hide(title).replace("&", "&amp;").replace("<", "&lt;").encode("utf-8", "replace").decode(),
        "style": _read("uPlot.min.css") + _read("page.css"),
        "data": hide(embedded(_without_nan(texts))),
        # Letters of a binary number can be a name that looks secret, and the end of the number its value.
        "curves": embedded({"curves": data["curves"]}),
        "licence": licence.strip(),
        "library": script,
        "script": "\n".join(_read(name) for name in SCRIPTS),
    }
    # In one pass, so that placeholders inside the inserted texts are not replaced.
    names = "|".join(parts)
    return re.sub(f"@({names})@", lambda mark: parts[mark[1]], _read("page.html"))


def _without_nan(value: Any) -> Any:
    """Returns the data with None for numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
