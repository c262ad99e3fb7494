"""The text of a value in a message, whatever the value is.

The input is an object that a user gave; the output is one line of bounded length. Nothing here raises: a value that is
too deep, refers to itself, has more digits than Python writes, or whose own methods fail must not hide the message that
is about it.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

MOST_SHOWN = 80
"""Units: characters. The length to which the text of a value is cut."""
_LONGEST_PATH = 4095
"""Units: bytes. The length of the longest path that Linux accepts."""
_LONGEST_NAME = 255
"""Units: bytes. The length of the longest name of a file."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def shown(value: Any, most: int = MOST_SHOWN) -> str:
    """Returns a value as a message shows it: its `repr` on one line, cut if it is long.

    Args:
        value: any object.
        most: the length in characters to which the text is cut.

    Example:
        >>> shown("adam"), shown(10**5000), shown("x" * 100, 8)
        ("'adam'", 'a whole number of about 5001 digits', "'xxxxxxx")
    """
    if isinstance(value, int) and value.bit_length() > 4000:
        return f"a whole number of about {value.bit_length() * 30103 // 100_000 + 1} digits"
    try:
        # Only the beginning of a long text is shown, so only that is escaped.
        text = repr(value[:most] if type(value) in (str, bytes) else value)
        return _CONTROL.sub(" ", text)[:most]
    except Exception:  # noqa: BLE001 - code of a user's class, or a value that Python cannot write
        return f"<an object of {type(value).__name__}, which cannot be shown>"[:most]


def json_word(value: Any) -> str:
    """Returns the text under which a table of values lists a value: a text itself, and other values as JSON.

    Args:
        value: any object. One that cannot be written as JSON gets a text that no table lists.

    Example:
        >>> json_word("auto"), json_word(True), json_word([1])
        ('auto', 'true', '[1]')
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except Exception:  # noqa: BLE001 - as in `shown`
        return shown(value)


def are_equal(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; False if they cannot be compared.

    Args:
        one: any object.
        other: any object, such as a tensor, which has no single answer.

    Example:
        >>> are_equal(1, 1.0), are_equal("a", None)
        (True, False)
    """
    try:
        return one is other or bool(one == other)
    except Exception:  # noqa: BLE001 - as in `shown`
        return False


def is_one_of(value: Any, words: tuple[Any, ...]) -> bool:
    """Returns whether a value is one of some plain values, of the same type; any object can be asked about.

    Example:
        >>> is_one_of("min", ("min", "max")), is_one_of(1, (True, False)), is_one_of([], ("min",))
        (True, False, False)
    """
    return any(type(value) is type(word) and are_equal(value, word) for word in words)


def can_be_path(value: Any) -> bool:
    """Returns whether a value can be the path of a file or folder: a text or `os.PathLike` that the system takes.

    Example:
        >>> can_be_path("runs/a"), can_be_path(3), can_be_path("a\\0b")
        (True, False, False)
    """
    try:
        path = os.fspath(value)
    except Exception:  # noqa: BLE001 - as in `shown`
        return False
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        return False
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    longest = max(map(len, encoded.split(os.sep.encode())))
    return len(encoded) <= _LONGEST_PATH and longest <= _LONGEST_NAME
