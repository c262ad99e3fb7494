"""A plain value as YAML on one line.

Takes strings, numbers, booleans, None, mappings and sequences, gives flow-style YAML 1.2 that reads back
equal. Keeps true: the text has no line break, and no character that a YAML reader refuses or changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forgather.errors import RenderError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*", re.A)
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_ESCAPED = re.compile('[\x00-\x1f"\\\\\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]')
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_MAX_SIMPLE_KEY = 1000


def toyaml(value: Any) -> str:
    """Returns `value` as YAML in flow style on one line.

    Example:
        >>> toyaml({"lr": 1e-3, "names": ["a", "b c"], "none": None})
        '{lr: 0.001, names: [a, "b c"], none: null}'
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        return _string(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {toyaml(value[key])}" for key in value) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ", ".join(toyaml(item) for item in value) + "]"
    raise RenderError(
        f"'toyaml' cannot write {type(value).__name__}",
        code="FG118",
        hint="it writes strings, numbers, true, false, null, lists and mappings",
    )


def _float(value: float) -> str:
    if value != value:
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return repr(float(value))


def _key(key: Any) -> str:
    if isinstance(key, list | tuple | Mapping):
        raise RenderError("'toyaml' cannot write a list as a key", code="FG118", hint="use a string as the key")
    text = toyaml(key)
    return text if len(text) <= _MAX_SIMPLE_KEY else f"? {text} "


def _string(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS and len(text) <= _MAX_SIMPLE_KEY:
        return text
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    if "\ud800" <= char <= "\udfff":
        raise RenderError(
            f"'toyaml' cannot write a lone surrogate (U+{ord(char):04X})",
            code="FG118",
            hint="the text is not valid Unicode",
        )
    return _SHORT.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")
