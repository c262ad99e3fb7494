"""The page of `fgcli plan -o plan.html`: a plan as one HTML document that needs no other file.

Takes a plan as data, with its fit and its time where a device is known; gives HTML in the style of the report of a run.
The content security policy of the page forbids all network connections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.ml.report.html_text import html_text, prose_html
from forgather.ml.report.length_grid import VERDICTS, lengths_html
from forgather.ml.report.page import POLICY, STYLE
from forgather.ml.report.time_cards import amount, between, card, deadline_card, time_card
from forgather.planner.grid import largest_batch_sentences
from forgather.planner.memory_plan import format_size
from forgather.planner.ways_out import way_lines

_PLAN_STYLE = (Path(__file__).parent / "plan_page.css").read_text(encoding="utf-8")
# From the bottom of the timeline to its top: what lasts first.
_USES = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered weights",
    "buckets",
    "communication",
    "batch",
    "activations",
    "cache of keys and values",
    "logits",
    "temporaries",
    "workspaces of convolutions",
    "predictions",
)
_OTHER = len(_USES)
_PARTS = {"forward": "forward pass", "backward": "backward pass"}
_HEADROOM = 1.06
_WIDTH, _HEIGHT = 1000.0, 100.0  # of the timeline's view box, which is stretched to the width of the page


def plan_page(found: Mapping[str, Any]) -> str:
    """Returns a plan as an HTML document.

    Args:
        found: what `fgcli plan --json` prints: the plan, with `config`, `fit`, `time`, `grid`, `longest` and
            `largest_batch`.
    """
    title = str(found.get("config") or "plan")
    body = "".join(
        (
            _head(found, title),
            _tiles(found),
            _ranks(found),
            _largest_batch(found),
            _lengths(found),
            _timeline(found),
            _rows(found),
            time_card(found),
            deadline_card(found),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}: plan</title><style>{STYLE}{_PLAN_STYLE}</style></head>"
        f"<body><main>{body}{_more(found)}</main></body></html>\n"
    )


def _head(found: Mapping[str, Any], title: str) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1) or "one process"
    tokens = "" if found["tokens_per_row"] is None else f" of {found['tokens_per_row']:,} tokens"
    about = (
        f"{amount(found['parameters'])} parameters · {found['strategy']} · {mesh} · "
        f"{found['rows_per_update']:,} rows{tokens} an update"
    )
    verdict = _verdict(found)
    badge = f'<span class="badge {VERDICTS[verdict]}">{verdict}</span>' if verdict else ""
    return (
        f'<header><div><p class="kicker">plan of a run</p><h1>{html_text(title)}</h1>'
        f'<p class="sub">{html_text(about)}</p></div>{badge}</header>'
    )


def _verdict(found: Mapping[str, Any]) -> str | None:
    fits = (found.get("fit") or {}).get("ranks") or ()
    verdicts = {rank["verdict"] for rank in fits}
    return next((one for one in reversed(VERDICTS) if one in verdicts), None)


def _tiles(found: Mapping[str, Any]) -> str:
    worst = found["ranks"][0]
    fit, time = found.get("fit"), found.get("time")
    tiles = [("peak of a process", format_size(_peak(worst)["num_bytes"]), _who(worst, found["world_size"]))]
    if fit is not None and fit["hardware"]["memory_bytes"]:
        tiles.append(("device memory", format_size(fit["hardware"]["memory_bytes"]), fit["hardware"]["title"]))
    if time is not None:
        seconds = time["step"]["seconds"]
        tiles.append(("time of a step", between(seconds), f"{found['rows_per_update']:,} rows"))
        run = time["run"]
        if run is not None:
            hours = {bound: 3600 * number for bound, number in run["hours"].items()}
            tiles.append(("time of the run", between(hours), f"{run['num_updates']:,} steps"))
            if run.get("price") is not None:
                low, high = (f"{run['price'][bound]:,.0f}" for bound in ("low", "high"))
                devices = " to ".join(f"{run['gpu_hours'][bound]:,.0f}" for bound in ("low", "high"))
                tiles.append(("price of the run", f"{low} to {high}", f"{devices} device hours"))
    cells = "".join(
        f'<div class="tile"><span>{html_text(name)}</span><b>{html_text(value)}</b>'
        f"<small>{html_text(note)}</small></div>"
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _peak(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    peak: Mapping[str, Any] = max(rank["phases"], key=lambda phase: phase["num_bytes"])
    return peak


def _who(rank: Mapping[str, Any], world_size: int) -> str:
    first, last = rank["ranks"]
    who = "each process" if (first, last) == (0, world_size - 1) else f"rank {first}" + f" to {last}" * (last > first)
    return who + (f", stage {', '.join(map(str, rank['stages']))}" if rank["stages"] else "")


def _key(use: str) -> str:
    return f"u{_USES.index(use) if use in _USES else _OTHER}"


def _ordered(uses: Sequence[str]) -> list[str]:
    return sorted(dict.fromkeys(uses), key=lambda use: _USES.index(use) if use in _USES else _OTHER)


def _fits(found: Mapping[str, Any]) -> dict[tuple[int, ...], Mapping[str, Any]]:
    return {tuple(rank["ranks"]): rank for rank in (found.get("fit") or {}).get("ranks") or ()}


def _ranks(found: Mapping[str, Any]) -> str:
    """Returns a bar for each rank, divided by use, with the memory of the device as a line."""
    fits = _fits(found)
    needs = [_peak(rank)["num_bytes"] for rank in found["ranks"]]
    ends = [bound for fit in fits.values() for bound in (fit["most"], fit["available"])]
    whole = max([*needs, *ends, 1]) * _HEADROOM
    bars = "".join(
        _rank_bar(rank, found["world_size"], fits.get(tuple(rank["ranks"])), whole) for rank in found["ranks"]
    )
    uses = [row["name"] for rank in found["ranks"] for row in _peak(rank)["rows"]]
    legend = _legend(_ordered(uses), has_overheads=any(fit["overheads"] for fit in fits.values()))
    return card("Memory of each process at its peak", legend + bars)


def _rank_bar(rank: Mapping[str, Any], world_size: int, fit: Mapping[str, Any] | None, whole: float) -> str:
    peak = _peak(rank)
    sizes = {row["name"]: row["num_bytes"] for row in peak["rows"]}
    parts = [(use, _key(use), sizes[use]) for use in _ordered(list(sizes))]
    if fit is not None and fit["overheads"]:
        least, most = (sum(one[bound] for one in fit["overheads"]) for bound in ("least", "most"))
        parts += [("overhead, at least", "least", least), ("overhead, at most", "most", most - least)]
    pieces = "".join(
        f'<i class="{key}" style="--share:{size / whole:.3%}" title="{html_text(name)}: {format_size(size)}"></i>'
        for name, key, size in parts
    )
    line, words = "", format_size(peak["num_bytes"])
    if fit is not None:
        least, most = (format_size(fit[bound]) for bound in ("least", "most"))
        needs = least if least == most else f"{least} to {most}"
        words += f" of tensors; needs {needs} of {format_size(fit['available'])}"
        line = f'<u style="--at:{fit["available"] / whole:.3%}" title="memory of the device"></u>'
        words += f' · <b class="{VERDICTS[fit["verdict"]]}">{fit["verdict"]}</b>'
    return (
        f'<div class="rank"><p><span>{html_text(_who(rank, world_size))}</span><span>{words}</span></p>'
        f'<div class="stack">{pieces}{line}</div></div>'
    )


def _legend(uses: Sequence[str], *, has_overheads: bool = False) -> str:
    keys = "".join(f'<span><i class="{_key(use)}"></i>{html_text(use)}</span>' for use in uses)
    if has_overheads:
        keys += '<span><i class="least"></i>overhead (assumed)</span><span><u></u>memory of the device</span>'
    return f'<p class="uses">{keys}</p>'


def _largest_batch(found: Mapping[str, Any]) -> str:
    if (answer := found.get("largest_batch")) is None:
        return ""
    lines = "".join(f'<p class="note">{html_text(one)}</p>' for one in largest_batch_sentences(answer))
    return card("The largest batch", lines)


def _lengths(found: Mapping[str, Any]) -> str:
    body = lengths_html(found)
    return body and card("Tokens of a row x rows of a micro-batch: peak of a process, tokens a second", body)


def _timeline(found: Mapping[str, Any]) -> str:
    """Returns the bytes that live in each part of a step of the rank with the largest peak, as stacked areas."""
    rank = found["ranks"][0]
    places = rank["timeline"]
    if len(places) < 2:
        return ""
    fit = _fits(found).get(tuple(rank["ranks"]))
    sums = [sum(place["uses"].values()) for place in places]
    top = max(sums) * _HEADROOM
    limit = fit["available"] if fit is not None and fit["available"] <= 2 * top else None
    top = max(top, (limit or 0) * _HEADROOM)
    across = _positions(places)
    areas, floor = [], [0.0] * len(places)
    uses = _ordered([use for place in places for use in place["uses"]])
    for use in uses:
        above = [low + place["uses"].get(use, 0) for low, place in zip(floor, places, strict=True)]
        areas.append(_area(_key(use), use, across, floor, above, top))
        floor = above
    number = max(range(len(places)), key=sums.__getitem__)
    left, high = across[number] / _WIDTH, sums[number] / top
    side = " left" if left > 0.6 else ""
    mark = (
        f'<b class="peak{side}" style="--x:{left:.2%};--y:{high:.2%}"><span>peak {format_size(sums[number])}</span></b>'
    )
    device = (
        ""
        if limit is None
        else f'<em class="limit" style="--y:{limit / top:.2%}"><span>device {format_size(limit)}</span></em>'
    )
    ticks = "".join(
        f'<em style="--y:{value / top:.2%}"><span>{format_size(value)}</span></em>' for value in _ticks(top)
    )
    made_by = _peak(rank)["made_by"]
    cause = f", when {made_by} was allocated" if made_by else ""
    note = f"The peak is in the {places[number]['at']}{cause}."
    picture = (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html_text(note)}">{"".join(areas)}</svg>'
    )
    return card(
        f"Memory over a step: the peak of each part, {_who(rank, found['world_size'])}",
        f'{_legend(uses)}<div class="time"><div class="grid">{ticks}</div>{picture}{device}{mark}</div>'
        f"{_axis(places, across)}"
        f'<p class="note">{html_text(note)}</p>',
    )


def _positions(places: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the x of each place: as far from the one before it as there are blocks between them."""
    steps = [0.0]
    for before, place in zip(places, places[1:], strict=False):
        same = before["phase"] == place["phase"]
        steps.append(steps[-1] + max(1, abs(place["block"] - before["block"]) if same else 1))
    # The update is one place, which is given about a tenth of the width for its name.
    for number, place in enumerate(places):
        if place["phase"] == "update":
            wide = steps[-1] / (5 if number == len(places) - 1 else 10)
            steps = [step + wide * ((n >= number) + (n > number)) for n, step in enumerate(steps)]
    return [_WIDTH * step / steps[-1] for step in steps]


def _area(
    key: str, use: str, across: Sequence[float], floor: Sequence[float], above: Sequence[float], top: float
) -> str:
    def points(values: Sequence[float]) -> list[str]:
        return [f"{x:.1f},{_HEIGHT * (1 - y / top):.2f}" for x, y in zip(across, values, strict=True)]

    outline = " ".join([*points(above), *reversed(points(floor))])
    return f'<polygon class="{key}" points="{outline}"><title>{html_text(use)}</title></polygon>'


def _ticks(top: float) -> list[float]:
    step = 2.0 ** max(0, (int(top) // 3).bit_length() - 1)
    return [step * number for number in range(1, int(top / step) + 1)]


def _axis(places: Sequence[Mapping[str, Any]], across: Sequence[float]) -> str:
    """Returns the names of the passes below the timeline, each as wide as its part."""
    starts = [n for n, place in enumerate(places) if n == 0 or place["phase"] != places[n - 1]["phase"]]
    bounds = [0.0, *((across[n] + across[n - 1]) / 2 for n in starts[1:]), _WIDTH]
    names = [_PARTS.get(places[n]["phase"], places[n]["phase"]) for n in starts]
    cells = "".join(
        f'<span style="--share:{(right - left) / _WIDTH:.2%}" title="{name}"><i>{name}</i></span>'
        for name, left, right in zip(names, bounds[:-1], bounds[1:], strict=True)
    )
    return f'<div class="parts">{cells}</div>'


def _rows(found: Mapping[str, Any]) -> str:
    """Returns the rows of each phase of the rank with the largest peak, each marked with how it was found."""
    rank = found["ranks"][0]
    tables = "".join(_phase_table(phase) for phase in rank["phases"])
    fit = _fits(found).get(tuple(rank["ranks"]))
    others = [
        ("overhead of each process", fit["overheads"] if fit is not None else []),
        ("memory of each machine", found["host"]),
        ("disk", found["disk"]),
    ]
    tables += "".join(_bounded_table(title, rows) for title, rows in others if rows)
    keys = (
        '<p class="note"><b class="traced">traced</b> the code of the run allocated it, with tensors without values · '
        '<b class="formula">formula</b> from settings and sizes · <b class="assumed">assumed</b> a usual value</p>'
    )
    return card("What it is, and how it was found", f'<div class="tables">{tables}</div>{keys}')


def _phase_table(phase: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td><i class="{_key(row["name"])}"></i>{html_text(row["name"])}</td>'
        f"<td>{format_size(row['num_bytes'])}</td><td>{row['num_bytes'] / max(1, phase['num_bytes']):.0%}</td>"
        f'<td><b class="{row["source"]}">{row["source"]}</b></td></tr>'
        for row in phase["rows"]
    )
    title = f"{phase['phase']}: {format_size(phase['num_bytes'])}, in the {phase['at']}"
    return f'<table class="uses-table"><caption>{html_text(title)}</caption><tbody>{rows}</tbody></table>'


def _bounded_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cells = "".join(
        f"<tr><td>{html_text(row['name'])}<small>{prose_html(row['basis'])}</small></td><td>{_sizes(row)}</td><td></td>"
        f'<td><b class="{row["source"]}">{row["source"]}</b></td></tr>'
        for row in rows
    )
    return f'<table class="uses-table"><caption>{title}</caption><tbody>{cells}</tbody></table>'


def _sizes(row: Mapping[str, Any]) -> str:
    least, most = format_size(row["least"]), format_size(row["most"])
    return least if least == most else f"{least} to {most}"


def _more(found: Mapping[str, Any]) -> str:
    lines = way_lines((found["fit"] or {}).get("ways_out", ()))
    ways = [f"{line}: `{words.strip()}`" for line, words in zip(lines[::2], lines[1::2], strict=True)]
    lists = [("The nearest ways out, each planned", ways), ("Notes", found["notes"])]
    return "".join(
        card(title, f"<ul>{''.join(f'<li>{prose_html(one)}</li>' for one in items)}</ul>")
        for title, items in lists
        if items
    )
