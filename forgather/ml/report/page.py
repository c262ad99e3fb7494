"""The report page: facts to one HTML document with nothing outside it.

Keeps true: every text from a file is escaped, and its secrets are hidden; the page forbids itself any connection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forgather.ml.number_format import count, duration, evaluation_losses, figure, perplexity, size
from forgather.ml.report.chart import Look, chart
from forgather.ml.report.html_text import html_text
from forgather.ml.report.run_data import RunFacts
from forgather.redaction import hidden, hide, hide_known

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
_SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

# Titles of the charts, the series each shows and its options; what no chart names gets one of its own.
_CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...], Look], ...] = (
    ("Learning rate", (("learning_rate", "lr"),), Look(may_log=False, from_zero=True, smooth=False)),
    ("Gradient norm", (("grad_norm", "gradient norm"),), Look()),
    (
        "Tokens per second",
        (("tokens_per_second", "tokens/s"), ("train_tokens_per_second", "tokens/s")),
        Look(may_log=False, from_zero=True),
    ),
    ("Samples per second", (("samples_per_second", "samples/s"),), Look(may_log=False, from_zero=True)),
    (
        "Memory",
        (("memory_bytes", "in use"), ("memory_peak_bytes", "peak"), ("memory_reserved_bytes", "reserved")),
        Look(may_log=False, from_zero=True, smooth=False),
    ),
)
_UNCHARTED = ("_runtime", "_per_second", "total_flos", "train_loss", "num_input_tokens_seen")


def page(facts: RunFacts) -> str:
    """Returns the report as HTML."""
    title = _title(facts)
    body = "".join(
        (
            _head(facts, title),
            _tiles(facts),
            _problems(facts),
            f'<section class="charts">{_charts(facts)}</section>',
            _samples(facts.samples),
            _evaluations(facts),
            _settings(facts),
            _files(facts),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _title(facts: RunFacts) -> str:
    noted = " · ".join(str(facts.run[key]) for key in ("project", "config") if facts.run.get(key))
    return str(facts.summary.get("name") or noted or facts.folder.resolve().name)


def _status(facts: RunFacts) -> str:
    status = str(facts.summary.get("status", "unknown"))
    return "did not finish" if status == "running" else status


def _head(facts: RunFacts, title: str) -> str:
    status = _status(facts)
    model = facts.summary.get("model") or {}
    described = [str(model["class"])] if model.get("class") else []
    if model.get("num_parameters"):
        described.append(f"{count(model['num_parameters'])} parameters")
    if started := facts.summary.get("started"):
        described.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)))
    kind = {"finished": "good", "failed": "bad", "did not finish": "bad"}.get(status, "fair")
    return (
        f'<header><div><p class="kicker">training run</p><h1>{html_text(title)}</h1>'
        f'<p class="sub">{html_text(" · ".join(described))}</p></div>'
        f'<span class="badge {kind}">{html_text(status)}</span></header>'
    )


def _tiles(facts: RunFacts) -> str:
    summary = facts.summary
    loss = facts.last("loss")
    steps = [record["step"] for record in facts.records if isinstance(record.get("step"), int)]
    step = summary.get("step") or max(steps, default=None)
    seconds = summary.get("seconds") or _elapsed(facts.records)
    unit = next((unit for unit in ("tokens", "samples") if _speed(facts, unit)), "tokens")
    speed = _speed(facts, unit)
    tiles: list[tuple[str, str | None, str]] = [
        *_evaluated(facts),
        ("train loss", figure(loss) if loss is not None else None, "last logged"),
        (
            "steps",
            str(step) if step is not None else None,
            _of_steps(step, summary.get("max_steps")),
        ),
        ("time", duration(seconds) if seconds else None, ""),
        (
            f"{unit}/s",
            count(speed) if speed else None,
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
    """Returns the tiles of each evaluation set."""
    tiles: list[tuple[str, str | None, str]] = []
    for name, label in evaluation_losses(facts.series).items():
        value = facts.last(name)
        read = perplexity(value) if facts.summary.get("has_perplexity") else None
        tiles.append((label, figure(value) if value is not None else None, _best(facts, name)))
        tiles.append((label.replace("eval loss", "perplexity"), read, f"exp({label})"))
    return tiles


def _best(facts: RunFacts, name: str) -> str:
    series = facts.series.get(name)
    if not series or len(series.values) < 2:
        return "last"
    best = min(range(len(series.values)), key=series.values.__getitem__)
    return f"best {figure(series.values[best])} at step {figure(series.steps[best])}"


def _elapsed(records: Sequence[Mapping[str, Any]]) -> float:
    times = [record["time"] for record in records if isinstance(record.get("time"), int | float)]
    return times[-1] - times[0] if len(times) > 1 else 0.0


def _problems(facts: RunFacts) -> str:
    error = facts.summary.get("error")
    problems = [f"The run ended by {error}"] if error else []
    return "".join(f'<p class="note bad">{html_text(problem)}</p>' for problem in [*problems, *facts.problems])


def _charts(facts: RunFacts) -> str:
    series = facts.series
    cards, named = [], set()
    of_sets = ((name, label.replace("eval loss", "eval")) for name, label in evaluation_losses(series).items())
    losses = ("Loss", (("loss", "train"), *of_sets), Look(wide=True))
    for title, wanted, look in (losses, *_CHARTS):
        named |= {name for name, _ in wanted}
        found = [(label, series[name]) for name, label in wanted if name in series]
        cards.append(chart(title, found[:1] if title == "Tokens per second" else found, look))
    for name in sorted(set(series) - named):
        if not name.endswith(_UNCHARTED) and len(series[name].values) > 1:
            cards.append(chart(_words(name), [(name, series[name])]))
    return "".join(cards) or '<p class="note">No metric was logged yet.</p>'


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample.get("step"), []).append(sample)
    groups = []
    for number, (step, group) in enumerate(reversed(by_step.items())):
        texts = "".join(
            f'<pre class="sample"><mark>{html_text(str(s.get("prompt", "")))}</mark>'
            f"{html_text(str(s.get('text', '')))}</pre>"
            for s in group
        )
        groups.append(
            f"<details{' open' if number == 0 else ''}><summary>step {html_text(str(step))}</summary>{texts}</details>"
        )
    return f'<section><h2>What the model writes</h2><div class="card">{"".join(groups)}</div></section>'


def _evaluations(facts: RunFacts) -> str:
    rows: dict[Any, dict[str, Any]] = {}
    for record in facts.records:
        names = [name for name in record if name.startswith("eval_") and not name.endswith(_UNCHARTED)]
        found = {name: record[name] for name in names}
        if found:
            rows.setdefault(record.get("step"), {}).update(found)
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    head = "".join(f"<th>{html_text(_words(name.removeprefix('eval_')))}</th>" for name in names)
    body = "".join(_row([str(step), *(figure(row.get(name, "")) for name in names)]) for step, row in rows.items())
    table = f'<table class="numbers"><thead><tr><th>step</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<section><h2>Evaluations</h2><div class="card scroll">{table}</div></section>'


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{html_text(cell)}</td>' for cell in cells)}</tr>"


def _settings(facts: RunFacts) -> str:
    summary = facts.summary
    model = summary.get("model") or {}
    known = {} if facts.run.get("versions") else summary.get("versions") or {}
    parts = [
        ("Training arguments", summary.get("arguments"), False),
        ("Optimizer", summary.get("optimizer"), False),
        ("Learning rate schedule", summary.get("schedule"), False),
        ("Model configuration", model.get("config"), False),
        ("Versions and machine", {**known, **(summary.get("machine") or {})}, True),
        ("How it was started", facts.run, True),
    ]
    blocks = "".join(
        f"<details{' open' if is_open else ''}><summary>{title}</summary>{_table(values)}</details>"
        for title, values, is_open in parts
        if values
    )
    if facts.config:
        config = html_text(facts.config, is_document=True)
        blocks += f"<details><summary>Configuration</summary><pre>{config}</pre></details>"
    return f'<section><h2>How to repeat it</h2><div class="card">{blocks}</div></section>' if blocks else ""


def _table(values: Mapping[str, Any]) -> str:
    """Returns names and values in columns; what is not set is left out."""
    rows = "".join(
        f"<div><span>{html_text(name)}</span><code>{html_text(_cell(hidden(value, name)))}</code></div>"
        for name, value in _flat(values).items()
        if value is not None
    )
    return f'<div class="facts">{rows}</div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _files(facts: RunFacts) -> str:
    links = []
    for name in facts.files:
        file = facts.folder / name
        about = size(file.stat().st_size) if file.is_file() else "folder"
        # An ordinary word that `!env` gave stays: the link must lead to the file.
        shown = hide(hide_known(name, keeps_words=True), is_named=True)
        links.append(f'<li><a href="{quote(shown)}">{escape(shown)}</a> <small>{about}</small></li>')
    places = facts.summary.get("places") or {}
    where = _table({name: place for name, place in places.items() if place})
    listed = f'<ul class="files">{"".join(links)}</ul>'
    return f'<section><h2>Files</h2><div class="card">{where if places else ""}{listed}</div></section>'


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize()
