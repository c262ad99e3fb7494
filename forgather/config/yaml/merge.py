"""Merge keys and duplicate keys of one mapping.

The inputs are the entries of a mapping in the order of the document, and the mappings under its `<<` keys; the output
is the effective entries. Invariants: explicit keys override merged ones, a later `<<` line overrides an earlier one,
and within one `<<: [*a, *b]` the earlier mapping wins; overridden entries are kept in `Entry.replaced`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from forgather.config.graph import Entry
from forgather.config.yaml.duplicate_keys import KeyVerdict, Repeat, verdict_on
from forgather.config.yaml.source_positions import Template
from forgather.source import Origin

MERGE_KEY = "<<"
_REMEMBERED = 20


def with_merges(
    explicit: Iterable[Entry],
    merges: Iterable[tuple[Origin | None, Iterable[tuple[Entry, ...]]]],
    descents: AbstractSet[tuple[Template, Template]],
    report: Callable[[Repeat], None],
) -> tuple[Entry, ...]:
    """Returns the effective entries, merged keys first, each at the position of its first occurrence.

    Args:
        explicit: the entries that are written in the mapping itself.
        merges: for each `<<` line, the place of the line and the entries of each mapping that the line names.
        descents: the pairs of a template and a template that it extends.
        report: a function that is called for each duplicate explicit key.
    """
    merged: dict[object, Entry] = {}
    for origin, sources in merges:
        line: dict[object, Entry] = {}
        for entries in sources:
            for entry in entries:
                # Within one `<<: [*a, *b]`, the earlier mapping wins.
                if entry.key not in line:
                    line[entry.key] = through_alias(entry, MERGE_KEY, () if origin is None else (origin,))
        _put_all(merged, line.values())
    own: dict[object, Entry] = {}
    for entry in explicit:
        earlier = own.get(entry.key)
        if earlier is None:
            own[entry.key] = entry
        else:
            report(_repeat(earlier, entry, descents))
            own[entry.key] = overriding(entry, earlier)
    if not merged:
        return tuple(own.values())
    # Own keys last, so that they override merged ones but keep the position of the first.
    _put_all(merged, own.values())
    return tuple(merged.values())


def overriding(entry: Entry, earlier: Entry) -> Entry:
    """Returns a copy of `entry` that overrides `earlier` and keeps it in `replaced`."""
    # Each override copies the history of the one before, so its length is bounded.
    return replace(entry, replaced=(*entry.replaced, earlier, *earlier.replaced)[:_REMEMBERED])


def through_alias(entry: Entry, alias: str | None, through: tuple[Origin, ...]) -> Entry:
    """Returns a copy of `entry` that is reached through an alias or merge key at the lines `through`."""
    return replace(entry, alias=entry.alias or alias, through=(*through, *entry.through))


def _put_all(into: dict[object, Entry], entries: Iterable[Entry]) -> None:
    for entry in entries:
        earlier = into.get(entry.key)
        # Two merge lines may bring the same entry, which then overrides nothing.
        into[entry.key] = entry if earlier is None or earlier is entry else overriding(entry, earlier)


def _repeat(earlier: Entry, later: Entry, descents: AbstractSet[tuple[Template, Template]]) -> Repeat:
    # A mistake within one block must be found even if a line of the parent is between the two.
    for other in earlier.replaced:
        if verdict_on(other, later, descents) is KeyVerdict.CONFLICT:
            return Repeat(other, later, KeyVerdict.CONFLICT)
    return Repeat(earlier, later, verdict_on(earlier, later, descents))
