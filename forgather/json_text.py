"""JSON that a user wrote, with the line of each key.

Python's own reader keeps the last of several equal keys and drops the others; here they are a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
"""The keys and list numbers that lead to a value from the outside."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|[{}\[\],]')


class JsonFault(ValueError):
    """What is wrong with a text, and where.

    Args:
        message: what is wrong.
        line: the line, from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class JsonText:
    """A parsed text.

    Args:
        value: the value.
        lines: the line of each key, from 1.
    """

    value: Any
    lines: Mapping[Path, int]


def parse_json(text: str) -> JsonText:
    """Returns the value of a text, and where its keys are.

    Raises:
        JsonFault: if the text is not JSON, is nested too deeply, or gives a key of one object twice.

    Example:
        >>> parse_json('{"a": 1,\\n "b": [{"c": 2}]}').lines
        {('a',): 1, ('b',): 2, ('b', 0, 'c'): 2}
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise JsonFault(f"not JSON: {error.msg}", error.lineno) from None
    except RecursionError:
        raise JsonFault("nested too deeply", 1) from None
    except ValueError:
        # Python limits the digits of a whole number, because the conversion takes quadratic time.
        raise JsonFault("not usable: a number has more digits than can be read", 1) from None
    lines: dict[Path, int] = {}
    for path, line in _keys(text):
        if path in lines:
            raise JsonFault(f"not usable: it has the key {path[-1]!r:.60} twice, first on line {lines[path]}", line)
        lines[path] = line
    return JsonText(value, lines)


def _keys(text: str) -> Iterator[tuple[Path, int]]:
    """Yields each key of a valid text, with its line."""
    path: list[Any] = []
    line, counted = 1, 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word in "{[":
            path.append(0 if word == "[" else "")
        elif word in "}]":
            path.pop()
        elif word == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else path[-1]
        elif token[1]:
            path[-1] = json.loads(word.removesuffix(token[1]))
            line += text.count("\n", counted, token.start())
            counted = token.start()
            yield tuple(path), line
