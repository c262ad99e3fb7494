"""Differences between two graphs as lines for the terminal, and as plain data for JSON.

The inputs are the differences, and the `Labels` of both graphs. A difference is printed on one line if it fits. A value
that is used in several places of the graph is listed once, with the other paths in parentheses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from forgather.cli.palette import indent_of, styled
from forgather.config.insight.change import Change, Difference, Side
from forgather.config.insight.show import value_facts
from forgather.config.path import GraphPath, format_path
from forgather.project.origin_labels import Labels, cause_of, options_first
from forgather.source import Site

Places = tuple[Labels, Labels]
_TWO_VALUES = {Change.VALUE, Change.CONSTRUCTOR, Change.KIND, Change.NAME, Change.ORDER}
_MARKS = {Change.ADDED: "+", Change.REMOVED: "-"}
_WIDTH = 72
_SHOWN = 3
_ROLES = {"+ ": "added", "- ": "removed", "~ ": "changed"}


def difference_lines(differences: Sequence[Difference], places: Places) -> list[str]:
    """Returns the differences as lines of text, grouped by target.

    Args:
        differences: the differences between two graphs.
        places: the `Labels` of the old graph and of the new graph.
    """
    groups: dict[str, list[Difference]] = {}
    for item in differences:
        groups.setdefault(format_path(item.path[:1]), []).append(item)
    lines: list[str] = []
    for name, group in groups.items():
        elsewhere = _shared_heads(group)
        lines += ["", name + _also(elsewhere)]
        rows = [(_row(item, elsewhere), _where(item, places)) for item in group]
        width = max((len(left) for left, _ in rows if len(left) <= _WIDTH), default=0)
        for item, (left, where) in zip(group, rows, strict=True):
            if len(left) <= width:
                lines.append(f"{left:<{width}}  {where}".rstrip())
            else:
                lines += _long(item, left, where, elsewhere, places)
    return lines[1:]


def _long(item: Difference, left: str, where: str, elsewhere: Sequence[GraphPath], places: Places) -> Iterator[str]:
    """Yields the lines of a difference that does not fit on one line: one line for each value with its place."""
    if item.change not in _TWO_VALUES:
        yield left
        if where:
            yield f"      {where}"
        return
    yield f"  ~ {format_path(item.path[1:]) or 'itself'}{_also(_own_places(item, elsewhere))}"
    old, new = cause_of(item.old.origin, item.new.origin), cause_of(item.new.origin, item.old.origin)
    for mark, side, site, place in (("  ", item.old, old, places[0]), ("->", item.new, new, places[1])):
        yield f"   {mark} {side.text}" + (f"  {place.site(site)}" if site else "")


def summary(differences: Sequence[Difference]) -> str:
    """Returns the numbers of differences as text, for example "3 changed, 1 added, 2 removed"."""
    counts = Counter("~" if item.change not in _MARKS else _MARKS[item.change] for item in differences)
    words = {"~": "changed", "+": "added", "-": "removed"}
    return ", ".join(f"{counts[mark]} {word}" for mark, word in words.items() if counts[mark]) or "no difference"


def paint(line: str) -> str:
    """Returns a line of `fgcli diff` with colors for added, removed and changed values."""
    role = _ROLES.get(line[2:4] if line.startswith("  ") else "")
    if line == "no difference":
        return styled("good", line)
    return styled(role or ("dim" if line.startswith("      ") else "strong" if line[:1].strip() else ""), line)


def hang(line: str) -> int:
    """Returns the column at which the continuation lines of a wrapped line begin.

    It is the column of the key, two columns after the mark `+`, `-` or `~` that begins the line.
    """
    return indent_of(line) + 2


def difference_facts(differences: Sequence[Difference], places: Places) -> list[dict[str, Any]]:
    """Returns differences as plain data.

    Args:
        differences: the differences between two graphs.
        places: the `Labels` of the old graph and of the new graph.
    """
    return [_fact(item, places) for item in differences]


def _fact(item: Difference, places: Places) -> dict[str, Any]:
    fact: dict[str, Any] = {"change": str(item.change), "path": format_path(item.path)}
    fact["also"] = [format_path(path) for path in item.also]
    causes = cause_of(item.old.origin, item.new.origin), cause_of(item.new.origin, item.old.origin)
    fact["old"], fact["new"] = map(_side_fact, (item.old, item.new), causes, places)
    if item.partner is not None:
        fact["partner"] = format_path(item.partner)
    return fact


def _side_fact(side: Side, cause: Site | None, labels: Labels) -> dict[str, Any] | None:
    if not side.text and side.origin is None:
        return None
    fact: dict[str, Any] = {"text": side.text}
    if side.node is not None:
        fact["value"] = value_facts(side.node)
    if side.origin is not None and cause is not None:
        fact |= labels.place(cause)
        if side.origin.sets:
            fact["sets"] = [labels.place(site) for site in options_first(side.origin.sets)]
    return fact


def _row(item: Difference, elsewhere: Sequence[GraphPath]) -> str:
    inside = item.path[1:]
    key = f"{format_path(inside)}: " if inside else ""
    return f"  {_MARKS.get(item.change, '~')} {key}{_what(item)}{_also(_own_places(item, elsewhere))}"


def _own_places(item: Difference, elsewhere: Sequence[GraphPath]) -> list[GraphPath]:
    """Returns the other paths of a changed value, without those that follow from the other paths of its target."""
    return [path for path in item.also if not any(path == (*head, *item.path[1:]) for head in elsewhere)]


def _what(item: Difference) -> str:
    if item.change is Change.ADDED:
        return item.new.text
    if item.change is Change.REMOVED:
        return item.old.text
    if item.change is Change.APART:
        return f"was one object with {format_path(item.partner or ())}, is one of its own"
    if item.change is Change.SHARED:
        return f"was an object of its own, is one with {format_path(item.partner or ())}"
    if item.change in (Change.DEFAULT, Change.CODE):
        return f"{item.old.text} {item.new.text}"
    return f"{'order ' if item.change is Change.ORDER else ''}{item.old.text} -> {item.new.text}"


def _where(item: Difference, places: Places) -> str:
    old, new = cause_of(item.old.origin, item.new.origin), cause_of(item.new.origin, item.old.origin)
    shown = [place.site(site) for site, place in zip((old, new), places, strict=True) if site]
    return " -> ".join(dict.fromkeys(shown))


def _shared_heads(group: Sequence[Difference]) -> list[GraphPath]:
    """Returns the other paths of a target that all differences of a group have in common."""
    heads: list[GraphPath] | None = None
    for item in group:
        inside = item.path[1:]
        own = [path[: len(path) - len(inside)] for path in item.also if not inside or path[-len(inside) :] == inside]
        heads = own if heads is None else [head for head in heads if head in own]
    return [head for head in heads or [] if head]


def _also(paths: Sequence[GraphPath]) -> str:
    if not paths:
        return ""
    # The shortest path comes first: it is the one that a user would type.
    shown = sorted((format_path(path) for path in paths), key=lambda text: (text.count(".") + text.count("["), text))
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"  (also {', '.join(shown[:_SHOWN])}{more})"
