"""Values among others, and the form of plain ones.

Takes strings and their places, gives how wide they may be and what they are made of; `Part` is a value that is built in
a row with others. Keeps true: what is written means the very same text.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from forgather.codegen.python.ir import Expression, name
from forgather.config.path import GraphPath, Key

LONGEST_STRING, DEEPEST = 60, 4
SPREAD_MARK = "**"
"""What stands before a value that holds keywords, as `Part.before` and in a display of keywords."""
_LONGEST_PATH = 240


@dataclass(slots=True)
class Part:
    """One value among others that are built in a row.

    Args:
        before: what stands before it: `lr=`, `"key": `.
        make: builds it.
        wish: what a variable that holds it would be called.
        expression: what it became.
        dropped: True where only the building counts: another value takes its place.
    """

    before: str
    make: Callable[[], Expression]
    wish: str
    expression: Expression = name("None")
    dropped: bool = False


def below(folder: str, text: str) -> list[str]:
    """Returns the parts of a path below an absolute folder; none where joining them does not give the very text."""
    if not os.path.isabs(folder) or not text.startswith(folder + os.sep) or len(text) > _LONGEST_PATH:
        return []
    parts = text[len(folder) + 1 :].split(os.sep)
    return parts if all(parts) else []


def room(path: GraphPath) -> int:
    """Returns how wide a string at a path may be: the deeper it may be indented, the less."""
    if not path:
        return LONGEST_STRING
    step = path[-1]
    key = len(str(step.name)) if isinstance(step, Key) else 0
    return max(104 - 4 * min(len(path), DEEPEST + 1) - key, 20)
