"""Excerpts of the user's files: the line to which a finding refers, with carets below the value in question.

The input is findings; the output is lines of text. A file is read again only after it has changed, and only up to a
size limit. The carets are in the same columns as the text that they mark.
"""

from __future__ import annotations

import os
import re
import stat
from functools import lru_cache

from forgather.errors import Diagnostic
from forgather.source import Span

_MAX_READ = 1_000_000  # characters; a file of gigabytes is not read for one line
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
# A name in quotes; the apostrophe of "it's" must not start one.
_QUOTED = re.compile(r"(?<!\w)'([^'\n]+)'(?!\w)|(?<!\w)\"([^\"\n]+)\"(?!\w)")
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s,#{}\[\]](?:[^,#{}\[\]]*[^\s,#{}\[\]])?")


def visible(text: str) -> str:
    """Returns text in which control characters and invisible characters are escaped; line breaks and tabs are kept."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def clean(text: str, limit: int) -> str:
    """Returns text for a terminal, cut to `limit` characters: control characters are escaped, tabs shown as arrows."""
    # A file may be a single line of megabytes, so the text is cut before it is searched.
    shown = visible(text.replace("\r", "")[: limit + 1]).replace("\t", "→   ")
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def source_line(span: Span) -> str | None:
    """Returns the line of the user's file at a span, or None if the line cannot be read."""
    if not os.path.isabs(span.file):
        return None
    try:
        facts = os.stat(span.file)
        # Reading a pipe could wait forever.
        if not stat.S_ISREG(facts.st_mode):
            return None
        lines = _lines(span.file, facts.st_mtime_ns, facts.st_size)
    except OSError:
        return None
    return lines[span.line - 1] if 0 < span.line <= len(lines) else None


@lru_cache(maxsize=4)
def _lines(file: str, _mtime_ns: int, _size: int) -> list[str]:
    # Time and size are parameters, so that a changed file is read again.
    # Cached, because a file may have a finding on each of its lines.
    if _leads_elsewhere(file):
        return []
    with open(file, encoding="utf-8-sig", errors="replace", newline=None) as stream:
        return stream.read(_MAX_READ).split("\n")


def _leads_elsewhere(file: str) -> bool:
    """Returns True if a file is a symbolic link to a file in another folder, which a report must not print."""
    folder = os.path.realpath(os.path.dirname(file))
    return os.path.islink(file) and os.path.commonpath((folder, os.path.realpath(file))) != folder


def excerpt(span: Span | None, width: int, finding: Diagnostic | None = None) -> list[str]:
    """Returns the line at a span and, if the part to which the finding refers is known, a line of carets below it.

    Args:
        span: the place of the line. The result is empty if the span is None or the line cannot be read.
        width: the maximum number of columns. A longer line is cut so that the marked part is visible.
        finding: the finding whose part of the line is marked, or None for no carets.
    """
    text = source_line(span) if span is not None else None
    if text is None or not text.strip():
        return []
    text = text[:_MAX_READ].rstrip()
    start, end = marked(text, finding) if finding is not None else (0, 0)
    if end > start and len(clean(text[:end], end + 1)) > width - 3:
        # The line is cut at its beginning, so that the marked part is visible.
        cut = max(0, min(start, end - width // 2))
        text, start, end = f"...{text[cut:]}", start - cut + 3, end - cut + 3
    shown = clean(text, width)
    begin, behind = (min(len(clean(text[:stop], 4 * width)), len(shown)) for stop in (start, end))
    return [shown, " " * begin + "^" * (behind - begin)] if behind > begin else [shown]


def marked(line: str, finding: Diagnostic) -> tuple[int, int]:
    """Returns the start and end of the part of a line to which a finding refers, or (0, 0) if it is not known.

    The part is usually a name that the message quotes, such as 'Fracton' in "'fractions' has no symbol 'Fracton'". If
    several quoted names occur in the line, the last of them in the message is used. If none does, or if the message
    quotes the key and also contains the value, the part is the value at the finding's path.

    Args:
        line: the line of the file.
        finding: the finding.
    """
    begin = len(line) - len(line.lstrip())
    key = re.split(r"[.\[]", finding.path or "")[-1].rstrip("]")
    value = _value_of(key, line) if key else None
    names = [first or second for first, second in _QUOTED.findall(finding.message)]
    for name in reversed(names):
        found = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", line[begin:])
        if found is None:
            continue
        if name == key and value is not None and line[slice(*value)].strip("'\"") in finding.message.replace(name, ""):
            return value
        start, end = begin + found.start(), begin + found.end()
        in_quotes = start > 0 and line[start - 1] in "'\"" and line[start - 1] == line[end : end + 1]
        return start - in_quotes, end + in_quotes
    return value or (0, 0)


def _value_of(key: str, line: str) -> tuple[int, int] | None:
    """Returns the start and end of the value of a key in a line.

    The result is None if the line has no such key, or if the value is not a scalar on the same line without a tag,
    anchor or alias.
    """
    found = re.search(rf"(?<![\w.]){re.escape(key)}[\"']?\s*:\s+", line)
    value = _VALUE.match(line, found.end()) if found is not None else None
    # In a call or a container, the error is in one of the values inside, so the opening character is not marked.
    return value.span() if value is not None and value[0][0] not in "&!*|>[{" else None
