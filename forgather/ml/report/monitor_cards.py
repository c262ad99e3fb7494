"""The parts of the report page about what monitors found: events, ranks, operators and memory.

Takes the lines and documents of the run folder, which anybody may have written; gives HTML, "" for what is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgather.ml.number_format import format_bytes, format_number
from forgather.ml.report.html_text import html_text
from forgather.ml.report.run_data import RunFacts

_MOST_EVENTS, _MOST_OPERATORS, _MOST_MODULES = 100, 20, 20
_PARTS = {
    "data_seconds": "data",
    "forward_backward_seconds": "forward, backward",
    "sync_seconds": "sums over ranks",
    "update_seconds": "update",
    "communication_seconds": "communication",
}


_MARKED = {
    "Loss": ("spike", "not_finite", "plateau", "divergence"),
    "Gradient norm": ("explosion", "not_finite"),
    "Tokens per second": ("throughput",),
    "Samples per second": ("throughput",),
}
"""The kinds of anomalies that are marked on a chart, by its title."""


def marks_on(title: str, events: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Returns the step and the text of each event that is marked on a chart.

    Args:
        title: the title of the chart.
        events: the lines of the metrics file that have `event`.
    """
    return [
        (event["step"], f"{event['kind']}: {event.get('message', '')}")
        for event in events
        if event.get("kind") in _MARKED.get(title, ()) and type(step := event.get("step")) is int and 0 <= step < 2**53
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    titles = "".join(f"<th>{html_text(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{html_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f'<table class="numbers"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def monitor_parts(facts: RunFacts) -> list[tuple[str, str]]:
    """Returns the titles and the HTML of the collapsed parts of the page that monitors have written."""
    return [
        ("Ranks", ranks_html(facts.ranks)),
        ("Operators", operators_html(facts.operators)),
        ("Memory by phase and module", memory_html(facts.memory)),
    ]


def events_card(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of what happened at steps: anomalies, slow ranks, control actions.

    Args:
        events: the lines of the metrics file that have `event`.
    """
    rows = [
        [str(event.get("step", "")), str(event.get("kind") or event.get("event")), str(event.get("message", ""))]
        for event in events[:_MOST_EVENTS]
    ]
    more = len(events) - len(rows)
    note = f'<p class="note">and {more} more in metrics.jsonl</p>' if more > 0 else ""
    table = _table(["step", "what", "found"], rows)
    return f'<section class="card events"><h3>Events</h3>{table}{note}</section>' if table else ""


def ranks_html(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the numbers of each rank at the last log line, and its communication by process group and operation.

    Args:
        lines: the lines of `ranks.jsonl`.
    """
    last: Mapping[str, Any] = next((line for line in reversed(lines) if isinstance(line.get("ranks"), list)), {})
    ranks = [rank for rank in last.get("ranks", ()) if isinstance(rank, Mapping)]
    parts = {name: title for name, title in _PARTS.items() if any(name in rank for rank in ranks)}
    rows = [
        [
            str(rank.get("rank")),
            str(rank.get("host", "")),
            *(_milliseconds(rank.get(name)) for name in parts),
            _bytes(rank.get("memory_peak_bytes", rank.get("memory_bytes"))),
        ]
        for rank in ranks
    ]
    head = ["rank", "host", *(f"{title} (ms)" for title in parts.values()), "memory"]
    return _table(head, rows) + _communication(ranks)


def _communication(ranks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for rank in ranks:
        groups = rank.get("communication")
        for group, operations in groups.items() if isinstance(groups, Mapping) else ():
            for operation, found in operations.items() if isinstance(operations, Mapping) else ():
                if isinstance(found, Mapping):
                    seconds = found.get("seconds")
                    timed = "not measured" if seconds is None else format_number(seconds)
                    count, size = str(found.get("count")), _bytes(found.get("bytes"))
                    rows.append([str(rank.get("rank")), str(group), str(operation), count, size, timed])
    return _table(["rank", "group", "operation", "calls", "bytes", "seconds"], rows)


def _milliseconds(value: Any) -> str:
    return format_number(value * 1e3) if isinstance(value, int | float) else ""


def _bytes(value: Any) -> str:
    return format_bytes(value) if isinstance(value, int | float) and value >= 0 else ""


def operators_html(profile: Mapping[str, Any]) -> str:
    """Returns the table of the operators that took the most time.

    Args:
        profile: the content of `profile/operators.json`.
    """
    found = profile.get("operators")
    operators = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    on_device = any(one.get("self_device_us") for one in operators)
    kind = "device" if on_device else "cpu"
    total = sum(_number(one.get(f"self_{kind}_us")) for one in operators) or 1.0
    rows = [
        [
            str(one.get("name", ""))[:80],
            str(one.get("calls", "")),
            format_number(_number(one.get(f"self_{kind}_us")) / 1e3),
            f"{_number(one.get(f'self_{kind}_us')) / total:.1%}",
        ]
        for one in operators[:_MOST_OPERATORS]
    ]
    table = _table(["operator", "calls", f"own {kind} time (ms)", "share"], rows)
    where = html_text(f"{profile.get('steps')} steps; the trace is {profile.get('trace')}: open it in ui.perfetto.dev")
    return table and f'<p class="note">{where}</p>{table}'


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def memory_html(memory: Mapping[str, Any]) -> str:
    """Returns the peak of each phase and the largest modules.

    Args:
        memory: the content of `memory.json`.
    """
    phases, modules = memory.get("phases"), memory.get("modules")
    peaks = [[str(name), _bytes(peak)] for name, peak in phases.items()] if isinstance(phases, Mapping) else []
    names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "saved_activation_bytes", "total_bytes")
    rows = [
        [str(row.get("name") or row.get("class")), *(_bytes(row.get(name)) for name in names)]
        for row in (modules if isinstance(modules, list) else [])[:_MOST_MODULES]
        if isinstance(row, Mapping)
    ]
    missing = memory.get("not_measured")
    note = f"not measured: {'; '.join(map(str, missing))}" if isinstance(missing, list) and missing else ""
    tables = _table(["phase", f"peak, {memory.get('measured')}"], peaks)
    tables += _table(["module", "weights", "gradients", "optimizer", "saved activations", "together"], rows)
    return tables and tables + (f'<p class="note">{html_text(note)}</p>' if note else "")
