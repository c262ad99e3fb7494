"""Strings that carry their origins: the template lines that wrote each part.

The functions take and return pieces of text whose parts have trails (records of their origins). Invariant: a `Traced`
equals, character for character, the string that plain Jinja would have made; trails never change the text.

A trail is a tuple `(sites, sets, approximate, through_super)`. `sites`, `sets` and `approximate` are the fields of
`Origin`: the lines that wrote the text, the assignments of the names in it, and whether a filter changed it.
`through_super` is whether the text comes from `super()`. A site is a tuple `(template, line, block)`, in which the
template is an object. Trails and sites are plain tuples for speed, and are converted to `Origin` and `Site` at the end
of the render.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

Place = tuple[Any, int, str | None]
Trail = tuple[tuple[Place, ...], tuple[Place, ...], bool, bool]

LOST: Trail = ((), (), True, False)
BARE: Trail = ((), (), False, False)


class Traced(str):
    """A string with origins: `trails[i]` describes the part from `starts[i]` to `starts[i + 1]`."""

    # Slots: a render makes one such string for each printed value.
    __slots__ = ("starts", "trails")

    starts: Sequence[int]
    trails: Sequence[Trail]

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        # Only a contiguous slice keeps the order of the lines.
        if isinstance(key, slice) and key.step in (None, 1):
            begin, end, _ = key.indices(len(self))
            return cut(self, begin, end)
        return traced(str.__getitem__(self, key), LOST)

    def trail_at(self, offset: int) -> Trail:
        """Returns the trail (record of the origin) of the character at `offset`, or of the nearest character."""
        if not self.trails:
            return LOST
        return self.trails[max(bisect_right(self.starts, offset) - 1, 0)]


def traced(text: str, trail: Trail) -> Traced:
    """Returns `text` with one trail (record of its origin) for all characters."""
    made = str.__new__(Traced, text)
    made.starts, made.trails = ((0,), (trail,)) if text else ((), ())
    return made


def lost(text: str) -> Traced:
    """Returns `text` without origins, because a filter rebuilt it; its origin becomes the line that prints it."""
    return traced(text, LOST)


def segments(text: str, starts: Sequence[int], trails: Sequence[Trail]) -> Traced:
    """Returns `text` with one trail (record of the origin) for each segment.

    Args:
        text: the text to annotate.
        starts: the offset at which each segment begins, ascending from 0.
        trails: the trail of each segment.
    """
    made = str.__new__(Traced, text)
    made.starts, made.trails = starts, trails
    return made


def joined(pieces: Iterable[str]) -> Traced:
    """Returns the pieces as one text; the origin of a piece without trails becomes the line that prints it."""
    starts: list[int] = []
    trails: list[Trail] = []
    texts: list[str] = []
    offset = 0
    for piece in pieces:
        if not piece:
            continue
        texts.append(piece)
        if type(piece) is Traced:
            if len(piece.starts) == 1:
                starts.append(offset)
            else:
                starts.extend([start + offset for start in piece.starts])
            trails.extend(piece.trails)
        else:
            starts.append(offset)
            trails.append(BARE)
        offset += len(piece)
    return segments("".join(texts), starts, trails)


def cut(text: str, begin: int, end: int) -> Traced:
    """Returns `text[begin:end]`, with the origins of the characters."""
    plain = str.__getitem__(text, slice(begin, end))
    if type(text) is not Traced or not plain:
        return lost(plain)
    first = max(bisect_right(text.starts, begin) - 1, 0)
    last = max(bisect_right(text.starts, end - 1), first + 1)
    starts = [max(start - begin, 0) for start in text.starts[first:last]]
    return segments(plain, starts, text.trails[first:last])


def printed(text: Traced, site: Place, sets: tuple[Place, ...] = ()) -> Traced:
    """Returns a captured text with `site`, the line that prints it, added as its outermost site.

    Text from `super()` keeps its sites.

    Args:
        text: the captured text.
        site: the place that prints the text.
        sets: the places of the last `set` of each name in the printing expression.
    """
    trails = [
        trail if trail[3] else ((site, *trail[0]), trail[1] + sets if sets else trail[1], trail[2], False)
        for trail in text.trails
    ]
    return segments(str(text), text.starts, trails)


def nested(text: Traced, site: Place) -> Traced:
    """Returns the text of an included template; the include at `site` is added to its origins as the outermost line."""
    trails = [((site, *trail[0]), trail[1], trail[2], False) for trail in text.trails]
    return segments(str(text), text.starts, trails)


def through_super(text: Traced) -> Traced:
    """Returns the text of a parent's block, marked so that the line that prints it is not added to its origins."""
    trails = [trail if trail[3] else (trail[0], trail[1], trail[2], True) for trail in text.trails]
    return segments(str(text), text.starts, trails)


def owned(text: Traced, site: Place) -> Traced:
    """Returns a text in which `site` is the origin of every part that had no known origin."""
    trails = [trail if trail[0] else ((site,), trail[1], trail[2], False) for trail in text.trails]
    return segments(str(text), text.starts, trails)


def captured(text: Traced) -> Traced:
    """Returns the text of a macro or block without the mark of `super()`, so that printing the text adds a site."""
    # The common case without a copy.
    if not any(trail[3] for trail in text.trails):
        return text
    return segments(str(text), text.starts, [(trail[0], trail[1], trail[2], False) for trail in text.trails])


# -- filters that keep trails; each function computes the result again, and returns None if it differs from `result`


def follow_trim(text: Traced, result: str, chars: str | None = None) -> Traced | None:
    """Returns the result of `trim` or `str.strip` with its origins; None if they cannot be followed."""
    if not result:
        return lost("")
    begin = str.find(text, result)
    if begin < 0:
        return None
    # `find` gives the first occurrence, which need not be the one that trimming left.
    begin = len(text) - len(str.lstrip(text, chars)) if len(result) < len(text) else 0
    if str.__getitem__(text, slice(begin, begin + len(result))) != result:
        begin = 0
    made = cut(text, begin, begin + len(result))
    return made if made == result else None


def follow_replace(text: Traced, result: str, old: str, new: str, count: int | None = None) -> Traced | None:
    """Returns the result of `replace` with its origins; None if they cannot be followed.

    The origin of inserted text is that of the text which it replaces.
    """
    if not old:
        return None
    pieces: list[str] = []
    position, left = 0, -1 if count is None else count
    while left:
        found = str.find(text, old, position)
        if found < 0:
            break
        pieces.append(cut(text, position, found))
        # The new text may have lines of its own, but it was inserted by the line of the old one.
        pieces.append(traced(str(new), text.trail_at(found)))
        position, left = found + len(old), left - 1
    pieces.append(cut(text, position, len(text)))
    made = joined(pieces)
    return made if made == result else None


def follow_indent(
    text: Traced, result: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> Traced | None:
    """Returns the result of `indent` with its origins; None if they cannot be followed.

    The origin of the added spaces is that of the line after them.
    """
    indention = width if isinstance(width, str) else " " * width
    pieces: list[str] = []
    position = 0
    # The same steps as Jinja's `indent`, so that the result can be compared with its own.
    lines = (str(text) + "\n").splitlines(keepends=True)
    for number, line in enumerate(lines):
        body = line.splitlines()[0] if line.splitlines() else ""
        if number:
            pieces.append(traced("\n", text.trail_at(max(position - 1, 0))))
        if (body or blank) if number else first:
            pieces.append(traced(indention, text.trail_at(position)))
        pieces.append(cut(text, position, position + len(body)))
        position += len(line)
    made = joined(pieces)
    return made if made == result else None
