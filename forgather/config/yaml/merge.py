"""The keys of one mapping: repeats and merge keys settled.

Takes the entries of a mapping in the order in which they stand, and the mappings under its `<<` keys;
gives the entries that count. Keeps true: explicit keys beat merged ones, a later `<<` line beats an earlier
one, within one `<<: [*a, *b]` the earlier wins; whatever is overridden is remembered in `Entry.replaced`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from forgather.config.graph import Entry
from forgather.config.yaml.duplicate_keys import Repeat, Verdict, judge
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
    """Returns the entries that count, merged keys first, each in the place where it was first met.

    Args:
        explicit: entries written in the mapping itself.
        merges: for each `<<` line, its place and the entries of each mapping named there.
        descents: pairs of a template and one that it extends.
        report: called for each repeated explicit key.
    """
    merged: dict[object, Entry] = {}
    for origin, sources in merges:
        line: dict[object, Entry] = {}
        for entries in sources:
            for entry in entries:
                if entry.key not in line:
                    line[entry.key] = reached(entry, MERGE_KEY, () if origin is None else (origin,))
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
    _put_all(merged, own.values())
    return tuple(merged.values())


def overriding(entry: Entry, earlier: Entry) -> Entry:
    """Returns `entry` as the override of `earlier`, which it remembers."""
    return replace(entry, replaced=(*entry.replaced, earlier, *earlier.replaced)[:_REMEMBERED])


def reached(entry: Entry, alias: str | None, through: tuple[Origin, ...]) -> Entry:
    """Returns `entry` as it is seen through an alias or merge key at the lines `through`."""
    return replace(entry, alias=entry.alias or alias, through=(*through, *entry.through))


def _put_all(into: dict[object, Entry], entries: Iterable[Entry]) -> None:
    for entry in entries:
        earlier = into.get(entry.key)
        into[entry.key] = entry if earlier is None or earlier is entry else overriding(entry, earlier)


def _repeat(earlier: Entry, later: Entry, descents: AbstractSet[tuple[Template, Template]]) -> Repeat:
    for other in earlier.replaced:
        if judge(other, later, descents) is Verdict.CONFLICT:
            return Repeat(other, later, Verdict.CONFLICT)
    return Repeat(earlier, later, judge(earlier, later, descents))
