"""The report page of a run: one HTML document that needs no other file.

The input is a `RunFacts`; the output is HTML. Every text from a file of the run is escaped, and secrets in it are
hidden. The content security policy of the page forbids all network connections.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forgather.ml.metrics import step_seconds
from forgather.ml.number_format import (
    evaluation_loss_titles,
    evaluation_titles,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_perplexity,
)
from forgather.ml.report.chart import Look, chart
from forgather.ml.report.html_text import html_text
from forgather.ml.report.monitor_cards import events_card, marks_on, monitor_parts
from forgather.ml.report.run_data import RunFacts
from forgather.ml.report.samples import samples_html
from forgather.ml.report.settings_tables import settings_parts, value_table, value_text
from forgather.redaction import hidden, hide, hide_known

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
# In addition to the escaping of all texts: whatever a text of a run contains, the page can load and send nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

# (title, (series, label) of each curve, options). A series that is not listed gets a chart of its own.
_CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...], Look], ...] = (
    ("Learning rate", (("learning_rate", "lr"),), Look(may_log=False, from_zero=True, smooth=False)),
    ("Gradient norm", (("grad_norm", "gradient norm"),), Look()),
    (
        "Tokens per second",
        (("tokens_per_second", "tokens/s"), ("train_tokens_per_second", "tokens/s")),
        Look(may_log=False, from_zero=True),
    ),
    ("Samples per second", (("samples_per_second", "samples/s"),), Look(may_log=False, from_zero=True)),
    ("Model FLOPs utilization", (("mfu", "MFU"),), Look(may_log=False, from_zero=True)),
    (
        "Waiting for data, as a share of the time",
        (("data_wait_share", "waiting for data"),),
        Look(may_log=False, from_zero=True),
    ),
    (
        "Exposed communication, as a share of a step",
        (("communication_share", "exposed communication"),),
        Look(may_log=False, from_zero=True),
    ),
    (
        "Memory",
        (("memory_bytes", "in use"), ("memory_peak_bytes", "peak"), ("memory_reserved_bytes", "reserved")),
        Look(may_log=False, from_zero=True, smooth=False),
    ),
)
_CHANGES = 12  # of a config that changes more values than this, reading the config itself is easier
_UNCHARTED = ("_runtime", "_per_second", "total_flos", "train_loss", "num_input_tokens_seen")


def page(facts: RunFacts) -> str:
    """Returns the report page of a run as an HTML document."""
    title = _title(facts)
    body = "".join(
        (
            _head(facts, title),
            _tiles(facts),
            _problems(facts),
            f'<section class="first">{_loss(facts)}{_this_run(facts)}</section>',
            events_card(facts.events),
            _more(facts),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _title(facts: RunFacts) -> str:
    noted = " · ".join(str(facts.run[key]) for key in ("project", "config") if facts.run.get(key))
    return str(facts.summary.get("name") or noted or facts.folder.resolve().name)


_KINDS = {"finished": "good", "failed": "bad", "killed": "bad", "running": "live"}


def _badge(facts: RunFacts) -> str:
    """Returns the HTML of the status; that of a run that has not ended says when it was last seen."""
    status, kind = facts.status, _KINDS.get(facts.status, "fair")
    if facts.is_over:
        return f'<span class="badge {kind}">{html_text(status)}</span>'
    # Without a heartbeat, nobody knows whether the run goes on.
    word = f"{status} when last seen" if facts.heartbeat is None and kind == "live" else status
    at = f", step {facts.last_step or 0:,}" + (f" of {facts.max_steps:,}" if facts.max_steps else "")
    seen = ""
    if facts.last_seen is not None:
        # The script of the page shows how long ago that was, and loads the page again while the run goes on.
        mark = f' data-seen="{facts.last_seen:.0f}"' + (" data-live" if status in ("running", "paused") else "")
        seen = f"<small{mark}>last seen {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(facts.last_seen))}</small>"
    return f'<div class="state"><span class="badge {kind}">{html_text(word + at)}</span>{seen}</div>'


def _head(facts: RunFacts, title: str) -> str:
    model = facts.summary.get("model") or {}
    described = [str(model["class"])] if model.get("class") else []
    if model.get("num_parameters"):
        described.append(f"{format_count(model['num_parameters'])} parameters")
    if (started := facts.started) is not None:
        described.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)))
    return (
        f'<header><div><p class="kicker">training run</p><h1>{html_text(title)}</h1>'
        f'<p class="sub">{html_text(" · ".join(described))}</p></div>'
        f"{_badge(facts)}</header>"
    )


def _tiles(facts: RunFacts) -> str:
    summary = facts.summary
    loss = facts.last("loss")
    step = facts.last_step
    seconds = summary.get("seconds") or facts.elapsed_seconds
    unit = next((unit for unit in ("tokens", "samples") if _speed(facts, unit)), "tokens")
    speed = _speed(facts, unit)
    tiles: list[tuple[str, str | None, str]] = [
        *_evaluated(facts),
        ("train loss", format_number(loss) if loss is not None else None, "last logged"),
        (
            "steps",
            str(step) if step is not None else None,
            _of_steps(step, facts.max_steps),
        ),
        ("time", format_duration(seconds) if seconds else None, ""),
        (
            f"{unit}/s",
            format_count(speed) if speed else None,
            "median" if summary.get(f"{unit}_per_second") else "last logged",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><span>{html_text(label)}</span><b>{html_text(value)}</b>'
        f"<small>{html_text(note)}</small></div>"
        for label, value, note in tiles
        if value is not None
    )
    return f'<section class="tiles">{cells}</section>' if cells else ""


def _of_steps(step: int | None, max_steps: int | None) -> str:
    if not max_steps:
        return ""
    return f"of {max_steps}" if step is None or step <= max_steps else f"past max_steps {max_steps}"


def _speed(facts: RunFacts, unit: str) -> float | None:
    return facts.summary.get(f"{unit}_per_second") or facts.last(f"{unit}_per_second")


def _evaluated(facts: RunFacts) -> list[tuple[str, str | None, str]]:
    """Returns the label, value and note of each tile for evaluations: their metrics, and their perplexity if any."""
    tiles: list[tuple[str, str | None, str]] = []
    losses = evaluation_loss_titles(facts.series)
    for name, label in evaluation_titles(facts.series).items():
        value = facts.last(name)
        note = _best(facts, name) if name in losses else _range(facts, name)
        tiles.append((label, format_number(value) if value is not None else None, note))
        read = format_perplexity(value) if name in losses and facts.summary.get("has_perplexity") else None
        tiles.append((label.replace("eval loss", "perplexity"), read, f"exp({label})"))
    return tiles


def _range(facts: RunFacts, name: str) -> str:
    # Whether more is better is known of the metric that chooses the best model only.
    values = facts.series[name].values
    return f"from {format_number(min(values))} to {format_number(max(values))}" if len(values) > 1 else "last"


def _best(facts: RunFacts, name: str) -> str:
    series = facts.series.get(name)
    if not series or len(series.values) < 2:
        return "last"
    best = min(range(len(series.values)), key=series.values.__getitem__)
    return f"best {format_number(series.values[best])} at step {format_number(series.steps[best])}"


def _problems(facts: RunFacts) -> str:
    error = facts.summary.get("error")
    cause = None if facts.heartbeat is None or error else (facts.heartbeat.cause or {}).get("message")
    problems = [f"The run ended by {error or cause}"] if error or cause else []
    return "".join(f'<p class="note bad">{html_text(problem)}</p>' for problem in [*problems, *facts.problems])


def _loss(facts: RunFacts) -> str:
    """Returns the first charts of the page: the training loss with the evaluation losses, and each other metric."""
    found = [(label, facts.series[name]) for name, label in _losses(facts).items() if name in facts.series]
    shown = (
        chart("Loss", found, Look(wide=True), marks_on("Loss", facts.events))
        or '<p class="note">No metric was logged yet.</p>'
    )
    metrics = "".join(
        chart(label, [(label, facts.series[name])])
        for name, label in evaluation_titles(facts.series).items()
        if name not in _losses(facts) and len(facts.series[name].values) > 1
    )
    return shown + (f'<div class="charts">{metrics}</div>' if metrics else "")


def _losses(facts: RunFacts) -> dict[str, str]:
    of_sets = {name: label.replace("eval loss", "eval") for name, label in evaluation_loss_titles(facts.series).items()}
    return {"loss": "train", **of_sets}


def _this_run(facts: RunFacts) -> str:
    """Returns the HTML section "This run".

    It has the changes from the parent config, the command that repeats the run, and the paths of the results.
    """
    places = facts.summary.get("places") or {}
    rows = [
        *_changes(facts.run.get("changes")),
        ("Repeat", _commands(facts)),
        ("Peak memory", _peaks(facts)),
        ("Time of a step", _steps(facts)),
        *((_words(name), _code(str(places[name]))) for name in ("model", "checkpoint") if places.get(name)),
    ]
    shown = "".join(f"<dt>{html_text(name)}</dt><dd>{value}</dd>" for name, value in rows if value)
    return f'<section class="card"><h3>This run</h3><dl>{shown}</dl></section>' if shown else ""


def _peaks(facts: RunFacts) -> str:
    """Returns the HTML of the planned and the measured peak of the memory of rank 0, "" if one of them is unknown."""
    series, planned = facts.series.get("memory_peak_bytes"), facts.planned_peak
    if planned is None or planned <= 0 or series is None or not series.values:
        return ""
    measured = max(series.values)
    off = f"{(planned - measured) / measured:+.1%}" if measured > 0 else "?"
    return html_text(f"planned {format_bytes(planned)}, measured {format_bytes(measured)} on rank 0 (plan {off})")


def _steps(facts: RunFacts) -> str:
    """Returns the HTML of the planned and the measured time of a step, "" if one of them is unknown."""
    planned, measured = facts.planned_seconds, step_seconds(facts.records)
    if planned is None or measured is None:
        return ""
    low, high = (f"{seconds:.3g}" for seconds in planned)
    between = low if low == high else f"{low} to {high}"
    middle = sum(planned) / 2
    return html_text(f"planned {between} s, measured {measured:.3g} s (plan {middle / measured - 1:+.0%})")


def _code(text: str) -> str:
    return f"<code>{html_text(text)}</code>"


def _changes(changes: Any) -> list[tuple[str, str]]:
    """Returns a list with at most one entry: a title, and the values that differ from the parent config as HTML."""
    if not isinstance(changes, Mapping):
        return []
    values = [item for item in changes.get("values") or () if isinstance(item, Mapping)]
    items = [
        f"<li>{_code(str(item.get('path')))} "
        + (f"<s>{html_text(_change_text(item, 'was'))}</s> → " if item.get("was") is not None else "")
        + f"<b>{html_text(_change_text(item, 'value'))}</b></li>"
        for item in values[:_CHANGES]
    ]
    if rest := len(values) - _CHANGES if len(values) > _CHANGES else 0:
        items.append(f"<li><small>and {rest} more: see “Configuration”</small></li>")
    parent = changes.get("parent")
    title = f"Changed against {parent}" if parent else "Changed"
    return [(title, f"<ul>{''.join(items)}</ul>" if items else "nothing")] if items or parent else []


def _change_text(item: Mapping[str, Any], name: str) -> str:
    path = str(item.get("path"))
    return value_text(hidden(item.get(name), path.rpartition(".")[2] or path))


def _commands(facts: RunFacts) -> str:
    """Returns the HTML of the command that repeats the run, and of the command that started the run."""
    command, begun_in = facts.run.get("command"), facts.run.get("working_dir")
    if not command:
        return ""
    folder = str(facts.folder.resolve())
    if begun_in and os.path.isabs(str(begun_in)):
        near = os.path.relpath(folder, str(begun_in))
        folder = folder if near.startswith(os.pardir) else near
    typed = f"<small>it was started by</small> {_code(str(command))}"
    where = f" <small>in</small> {_code(str(begun_in))}" if begun_in else ""
    return f"{_code(shlex.join(['fgcli', 'rerun', folder]))}<br>{typed}{where}"


def _more(facts: RunFacts) -> str:
    """Returns the HTML of the collapsed parts of the page: further charts, samples, settings, versions and files."""
    charts = _charts(facts)
    draws = any("image" in sample for sample in facts.samples)
    parts = [
        ("Learning rate, gradients, speed and memory", charts and f'<div class="charts">{charts}</div>'),
        (f"What the model {'draws' if draws else 'writes'}", samples_html(facts.samples, facts.folder)),
        ("Evaluations", _evaluations(facts)),
        *monitor_parts(facts),
        *settings_parts(facts),
        ("Files", _files(facts)),
    ]
    shown = "".join(f"<details><summary>{title}</summary>{body}</details>" for title, body in parts if body)
    return f'<section class="card more">{shown}</section>'


def _charts(facts: RunFacts) -> str:
    series = facts.series
    cards, named = [], {"loss", *evaluation_titles(series)}
    for title, wanted, look in _CHARTS:
        named |= {name for name, _ in wanted}
        found = [(label, series[name]) for name, label in wanted if name in series]
        # `train_tokens_per_second` is the mean of the run, one point: it is shown only if nothing else was logged.
        found = found[:1] if title == "Tokens per second" else found
        cards.append(chart(title, found, look, marks_on(title, facts.events)))
    for name in sorted(set(series) - named):
        if not name.endswith(_UNCHARTED) and len(series[name].values) > 1:
            cards.append(chart(_words(name), [(name, series[name])]))
    return "".join(cards)


def _evaluations(facts: RunFacts) -> str:
    rows: dict[str, dict[str, Any]] = {}
    for record in facts.records:
        names = [name for name in record if name.startswith("eval_") and not name.endswith(_UNCHARTED)]
        found = {name: record[name] for name in names}
        if found:
            rows.setdefault(str(record.get("step")), {}).update(found)
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    head = "".join(f"<th>{html_text(_words(name.removeprefix('eval_')))}</th>" for name in names)
    body = "".join(_row([step, *(format_number(row.get(name, "")) for name in names)]) for step, row in rows.items())
    table = f'<table class="numbers"><thead><tr><th>step</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{html_text(cell)}</td>' for cell in cells)}</tr>"


def _files(facts: RunFacts) -> str:
    links = []
    for name in facts.files:
        file = facts.folder / name
        about = format_bytes(file.stat().st_size) if file.is_file() else "folder"
        # An ordinary word that `!env` gave stays: the link must lead to the file.
        shown = hide(hide_known(name, keeps_words=True), is_named=True)
        links.append(f'<li><a href="{quote(shown)}">{escape(shown)}</a> <small>{about}</small></li>')
    places = facts.summary.get("places") or {}
    where = value_table({name: place for name, place in places.items() if place})
    listed = f'<ul class="files">{"".join(links)}</ul>' if links else ""
    return (where if places else "") + listed


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize()
