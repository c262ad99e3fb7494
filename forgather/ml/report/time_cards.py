"""The cards of the page of a plan that are about time: a step by kinds of work, and the devices for a deadline.

Takes a plan as data; gives HTML, which is empty if the time is unknown or was not requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgather.ml.number_format import format_count
from forgather.ml.report.html_text import html_text, prose_html
from forgather.planner.device_count import growth_sentence

# Kinds of work that are uses of memory as well have the same colour in both.
_KEYS = {
    "matrix products": "w0",
    "attention": "w1",
    "elementwise": "w2",
    "recomputation": "w3",
    "bubble": "w4",
    "optimizer": "u1",
    "communication": "u5",
}
_OTHER = "w5"


def card(title: str, body: str) -> str:
    """Returns a card of the page.

    Args:
        title: the heading, as text.
        body: the content, as HTML.
    """
    return f'<section class="card"><h3>{html_text(title)}</h3>{body}</section>'


def amount(number: float) -> str:
    """Returns a large number as people say it: billions as "B"."""
    return format_count(number).replace("G", "B")


def between(bounds: Mapping[str, float]) -> str:
    """Returns a range of seconds as text, such as "1.5 to 3 min"."""
    low, high = duration(bounds["low"]), duration(bounds["high"])
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def duration(seconds: float) -> str:
    """Returns a number of seconds as text, in the unit that suits it."""
    for unit, size, least in (("days", 86400, 2 * 86400), ("hours", 3600, 7200), ("min", 60, 120), ("s", 1, 1)):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    if not seconds:
        return "0 s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def time_card(found: Mapping[str, Any]) -> str:
    """Returns the time of a step by kind of work: one bar for the lower bound and one for the upper bound.

    Args:
        found: what `fgcli plan --json` prints.
    """
    if found.get("time") is None:
        return ""
    step = found["time"]["step"]
    kinds = [kind for kind, seconds in step["rows"].items() if seconds["high"] > 0]
    whole = max(sum(step["rows"][kind][bound] for kind in kinds) for bound in ("low", "high")) or 1.0
    bars = "".join(_time_bar(step, kinds, bound, whole) for bound in ("low", "high"))
    rows = "".join(
        f'<tr><td><i class="{_KEYS.get(kind, _OTHER)}"></i>{html_text(kind)}</td><td>{between(step["rows"][kind])}</td>'
        f'<td><b class="assumed">assumed</b></td></tr>'
        for kind in kinds
    )
    assumed = "".join(f"<li>{prose_html(sentence)}</li>" for sentence in step["assumptions"])
    note = "Operators and bytes are traced; how fast they run is assumed:"
    return card(
        "Time of a step by kind of work",
        f'{bars}<p class="note">{_speed(step)}</p><table class="uses-table"><tbody>{rows}</tbody></table>'
        f'<p class="note">{note}</p><ul class="note">{assumed}</ul>',
    )


def _speed(step: Mapping[str, Any]) -> str:
    def counts(bounds: Mapping[str, float], factor: float = 1) -> str:
        return " to ".join(dict.fromkeys(amount(factor * bounds[bound]) for bound in ("low", "high")))

    mfu = " to ".join(dict.fromkeys(f"{100 * step['mfu'][bound]:.3g}" for bound in ("low", "high")))
    tokens = step["tokens_per_second"]
    return f"{counts(tokens)} tokens a second · {counts(tokens, 86400)} a day · MFU {mfu} %"


def _time_bar(step: Mapping[str, Any], kinds: Sequence[str], bound: str, whole: float) -> str:
    pieces = "".join(
        f'<i class="{_KEYS.get(kind, _OTHER)}" style="--share:{step["rows"][kind][bound] / whole:.3%}" '
        f'title="{html_text(kind)}: {duration(step["rows"][kind][bound])}"></i>'
        for kind in kinds
    )
    words = "at best" if bound == "low" else "at worst"
    return (
        f'<div class="rank"><p><span>{words}</span><span>{duration(step["seconds"][bound])}</span></p>'
        f'<div class="stack">{pieces}</div></div>'
    )


def deadline_card(found: Mapping[str, Any]) -> str:
    """Returns how many machines finish before the deadline that was asked for; "" if none was.

    Args:
        found: what `fgcli plan --json` prints.
    """
    count = found.get("devices")
    if count is None:
        return ""
    fewest, most = count["by_time"]["low"], count["by_time"]["high"]
    memory = "no number was found" if count["by_memory"] is None else f"at least {count['by_memory']:,}"
    days = {bound: 86400 * number for bound, number in count["days"].items()}
    rows = [
        ("machines, by time", f"{fewest:,.0f}" if fewest == most else f"{fewest:,.0f} to {most:,.0f}"),
        ("machines, by memory", memory),
        ("machines that were planned", f"{count['planned']:,} of {count['devices_per_machine']:,} devices"),
        ("time of the run on these", between(days)),
        ("tokens of a step", f"{count['tokens_per_update']:,}"),
        ("memory", count["verdict"]),
        *([("more could not be planned", count["why_fewer"])] if count["why_fewer"] else []),
    ]
    cells = "".join(f"<tr><td>{html_text(name)}</td><td>{prose_html(value)}</td></tr>" for name, value in rows)
    grown = growth_sentence(count)
    note = "" if grown is None else f'<p class="note">{html_text(grown)}</p>'
    return card("Devices for the deadline", f'<table class="uses-table"><tbody>{cells}</tbody></table>{note}')
