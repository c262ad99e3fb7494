"""Splits a file into its own text and its inline sub-templates.

The input is the text of a file; the output is the text up to the first `#--- name ---` line, and the named
sub-templates after that line. Invariants: every part has the line of the file on which it begins; the parts and their
header lines, joined, are the text of the file.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

_HEADER = re.compile(r"^#[ \t]*-{3,}[ \t]*([A-Za-z0-9](?:[\w./-]*[A-Za-z0-9])?)[ \t]*-{3,}[ \t]*$", re.M | re.A)
_RAW = re.compile(r"\{%[-+]?\s*(raw|endraw)\s*[-+]?%\}|^[ \t]*--[ \t]+(raw|endraw)[ \t]*$", re.M)


@dataclass(frozen=True, slots=True)
class Part:
    """One template of a file.

    Args:
        name: the name of the inline sub-template; None for the text before the first sub-template.
        line: the line of the file on which `text` begins, counted from 1.
        text: the text of the part, without its header line.
    """

    name: str | None
    line: int
    text: str


def is_header(line: str) -> bool:
    """Returns whether a line is the header of an inline sub-template."""
    return _HEADER.fullmatch(line) is not None


@lru_cache(maxsize=256)
def split(text: str) -> tuple[Part, ...]:
    """Returns the parts of a file; the first part is the text before any sub-template and has no name.

    Example:
        >>> [(part.name, part.line, part.text) for part in split("a: 1\\n#--- more ---\\nb: 2")]
        [(None, 1, 'a: 1\\n'), ('more', 3, 'b: 2')]
    """
    # A cheap test first: `{% raw %}` is rare.
    raw = _raw_spans(text) if "raw" in text else []
    parts: list[Part] = []
    name, line, begin = None, 1, 0
    for match in _HEADER.finditer(text):
        # A header line inside `{% raw %}` is text of a prompt.
        inside = bisect_right(raw, (match.start(), len(text))) - 1
        if inside >= 0 and match.start() < raw[inside][1]:
            continue
        part = text[begin : match.start()]
        parts.append(Part(name, line, part))
        line += part.count("\n") + 1
        # The text begins after the line end of the header; at the end of a file there is none, and the slice is empty.
        name, begin = match.group(1), match.end() + 1
    parts.append(Part(name, line, text[begin:]))
    return tuple(parts)


def _raw_spans(text: str) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    begin: int | None = None
    for match in _RAW.finditer(text):
        word = match.group(1) or match.group(2)
        if word == "raw" and begin is None:
            begin = match.end()
        elif word == "endraw" and begin is not None:
            spans.append((begin, match.start()))
            begin = None
    return spans
