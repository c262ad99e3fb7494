"""Counting, and text that is fit for a picture.

Takes boxes and texts, gives numbers and texts. Keeps true: a cut text says so by its last character.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from forgather.codegen.boxes import Box

# Characters that steer, hide or turn the reading direction, and those that XML has no way to write.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufffe\uffff]")


def uses(boxes: Iterable[Box]) -> Counter[int]:
    """Returns at how many places other boxes use each box; being named by the config is no use."""
    return Counter(row.box for box in boxes if box.node is not None for row in box.rows if row.box is not None)


def cut(text: str, width: int) -> str:
    """Returns the text, or its beginning and an ellipsis.

    Example:
        >>> cut("forgather", 5)
        'forg…'
    """
    return text if len(text) <= width else f"{text[: width - 1]}…"


def visible(text: str) -> str:
    """Returns the text with characters that cannot be seen, or that act on others, as escapes."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
