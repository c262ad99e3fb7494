"""Writes plain values as YAML text on one line.

The input is a string, number, boolean, null or tuple of these; the output is text that YAML reads as the same value.
"""

from __future__ import annotations

import math
import re

from forgather.config.lint.suspicious_scalars import lookalike
from forgather.config.path import PlainKey, PlainScalar
from forgather.config.yaml.events import Refusal
from forgather.config.yaml.scalars import resolve_scalar
from forgather.errors import GraphError

_PLAIN = re.compile(r"(?:[A-Za-z_/]|\.[A-Za-z0-9_])(?:[A-Za-z0-9_./@+=-]|:(?=[A-Za-z0-9_/])| (?=[A-Za-z0-9_./]))*")
_ESCAPED = re.compile('["\\\\\x00-\x1f\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def scalar_text(value: PlainScalar) -> str:
    """Returns the YAML text of a plain value.

    Raises:
        GraphError: FG330 if a string contains half of a surrogate pair, which YAML cannot represent.

    Example:
        >>> [scalar_text(value) for value in (None, True, 1e-05, "a b", "1", "no")]
        ['~', 'true', '1e-05', 'a b', '"1"', '"no"']
    """
    if value is None:
        return "~"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if not isinstance(value, str):
        # Python's repr of an int or float is read by YAML 1.2 as the same number.
        return repr(value)
    return value if _is_plain(value) else quoted(value)


def key_text(key: PlainKey) -> str:
    """Returns the YAML text of a mapping key."""
    if isinstance(key, tuple):
        return f"[{', '.join(scalar_text(part) for part in key)}]"
    return scalar_text(key)


def quoted(text: str) -> str:
    """Returns a string in double quotes, with escapes for characters that YAML or an editor would not preserve."""
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _is_plain(text: str) -> bool:
    # A text that only looks like a number is quoted as well, so that its reader need not know the rules of YAML.
    if len(text) > 1_000 or not _PLAIN.fullmatch(text) or lookalike(text) is not None:
        return False
    try:
        # The resolver decides, because a plain text must read back as a string.
        return resolve_scalar(text) == text
    except Refusal:
        return False


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    if "\ud800" <= char <= "\udfff":
        message = f"a string contains U+{ord(char):04X}, half of a surrogate pair"
        raise GraphError(message, code="FG330", hint="repair the string")
    return _SHORT.get(char) or f"\\u{ord(char):04x}"
