"""Similar names for suggestions.

The inputs are a name and the names that exist; the output is the closest of these names. The results equal those of
`difflib.get_close_matches`, at a fraction of the cost: the lengths and letters of two names rule out most pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache
from heapq import nlargest

_Letters = tuple[str, int, int, int]
MOST_COMPARED = 200_000
"""The limit on comparisons for one document. After it is reached, further misspelled names get no suggestion."""

_compared = 0


def begin_document() -> None:
    """Resets the count of compared names; it is called at the start of a document."""
    global _compared
    _compared = 0


def close_matches(name: str, possibilities: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Returns the names that are most similar to a name, the best first.

    After `MOST_COMPARED` comparisons in one document, the list is empty.

    Args:
        name: the name that was written.
        possibilities: the names that exist.
        n: the largest number of names to return.
        cutoff: the minimum similarity ratio, from 0 to 1.

    Source:
        `difflib.get_close_matches`: the same names in the same order.

    Example:
        >>> close_matches("appel", ["ape", "apple", "peach"])
        ['apple', 'ape']
    """
    global _compared
    table = _table(tuple(possibilities))
    if _compared > MOST_COMPARED:
        return []
    _compared += len(table)
    _, length, once, twice = _letters(name)
    matcher: SequenceMatcher[str] | None = None
    found: list[tuple[float, str]] = []
    for candidate, size, theirs, theirs_twice in table:
        least = cutoff * (length + size)
        # The ratio is 2 * matches / (length + size). No more letters can match than the shorter name has, and a letter
        # that the other name lacks cannot match.
        if 2 * (length if length < size else size) < least:
            continue
        if 2 * (length - (once & ~theirs).bit_count()) < least or 2 * (size - (theirs & ~once).bit_count()) < least:
            continue
        alone = (once & ~theirs).bit_count() + (twice & ~theirs_twice).bit_count()
        missing = (theirs & ~once).bit_count() + (theirs_twice & ~twice).bit_count()
        if 2 * (length - alone) < least or 2 * (size - missing) < least:
            continue
        if matcher is None:
            matcher = SequenceMatcher()
            matcher.set_seq2(name)
        matcher.set_seq1(candidate)
        _compared += size  # a comparison letter by letter counts by its length
        if matcher.quick_ratio() >= cutoff and (ratio := matcher.ratio()) >= cutoff:
            found.append((ratio, candidate))
    return [candidate for _, candidate in nlargest(n, found)]


def same_letters(name: str, possibilities: Iterable[str]) -> str | None:
    """Returns the first name that differs from `name` only in upper and lower case; None if there is none."""
    return _folded(tuple(possibilities)).get(name.casefold())


@lru_cache(maxsize=64)
def _folded(possibilities: tuple[str, ...]) -> dict[str, str]:
    return {possibility.casefold(): possibility for possibility in reversed(possibilities)}


@lru_cache(maxsize=64)
def _table(possibilities: tuple[str, ...]) -> list[_Letters]:
    return [_letters(possibility) for possibility in possibilities]


@lru_cache(maxsize=1 << 14)
def _letters(name: str) -> _Letters:
    """Returns a name, its length, a bit set of its letters, and a bit set of the letters that occur at least twice."""
    once = twice = 0
    for char in name:
        bit = 1 << (ord(char) & 127)
        twice |= once & bit
        once |= bit
    return name, len(name), once, twice
