"""What a template opens and does not close: quotes, tags and blocks.

Takes lines or source, gives what is open and its line. Keeps true: a line is one of the template's own; where nothing
is open the answer is None.
"""

from __future__ import annotations

import re

from forgather.config.syntax import unclosed_quote

_BLOCK_TAG = re.compile(r"\{%[-+]?\s*(block|endblock)\b\s*(\w*)")


def open_quote(lines: list[str], failing: int) -> tuple[str, int] | None:
    """Returns the quote, and the line of the statement, that runs on to the line at which reading failed."""
    for number in range(min(failing, len(lines)), 0, -1):
        quote = unclosed_quote(lines[number - 1])
        if quote is not None:
            closing = next((at for at in range(number + 1, len(lines) + 1) if quote in lines[at - 1]), number)
            return (quote, number) if failing in (number, closing) else None
    return None


def open_tag(source: str) -> tuple[str, int] | None:
    """Returns the mark and line of the last tag of a source, where nothing ends it."""
    mark, begin = max(("{{", source.rfind("{{")), ("{%", source.rfind("{%")), key=lambda item: item[1])
    if begin < 0 or source.find("}}" if mark == "{{" else "%}", begin) >= 0:
        return None
    return mark, source.count("\n", 0, begin) + 1


def open_block(source: str) -> tuple[str, int] | None:
    """Returns the name and line of a block of a source in which the end of another one stands."""
    opened: list[tuple[str, int]] = []
    for tag in _BLOCK_TAG.finditer(source):
        if tag[1] == "block":
            opened.append((tag[2], source.count("\n", 0, tag.start()) + 1))
        elif opened and tag[2] not in ("", opened[-1][0]):
            return opened[-1] if tag[2] in (name for name, _ in opened) else None
        elif opened:
            opened.pop()
    return None
