"""Typed paths inside a graph, and their text form (`trainer.args.lr`, `callbacks[2].prompts[0]`).

Invariant: parsing the text of a path gives an equal path.
"""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import dataclass

from forgather.errors import GraphError

PlainScalar = str | int | float | bool | None
PlainKey = PlainScalar | tuple[PlainScalar, ...]
"""The types of mapping keys that the config language allows."""


@dataclass(frozen=True, slots=True)
class Key:
    """A mapping key or a keyword argument."""

    name: PlainKey


@dataclass(frozen=True, slots=True)
class Index:
    """A position in a sequence, or a positional argument."""

    position: int


GraphPath = tuple[Key | Index, ...]

_PLAIN = re.compile(r"[^\W\d][\w-]*")
_TOKEN = re.compile(
    r"""\.?([^\W\d][\w-]*)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]"""
    r"""|\[key\ ((?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]'"])+)\]|\[([^\]']*)\]"""
)


def format_path(path: GraphPath) -> str:
    """Returns the text of a path; keys that are not plain names are written in brackets.

    Example:
        >>> format_path((Key("model"), Key("layers"), Index(2), Key("in.proj")))
        "model.layers[2]['in.proj']"
    """
    parts: list[str] = []
    for step in path:
        if isinstance(step, Index):
            parts.append(f"[{step.position}]")
        elif isinstance(step.name, str) and _PLAIN.fullmatch(step.name):
            # A dot only between steps: a path that begins with a dot names a definition.
            parts.append(f".{step.name}" if parts else step.name)
        elif isinstance(step.name, str):
            # The backslash first, else the escapes of the quotes would be escaped again.
            escaped = step.name.replace("\\", "\\\\").replace("'", "\\'")
            parts.append(f"['{escaped}']")
        else:
            parts.append(f"[key {step.name!r}]")
    return "".join(parts)


def parse_path(text: str) -> GraphPath:
    """Returns the path that a text describes.

    Raises:
        GraphError: FG310 if the text is not a path; the message gives the column.

    Example:
        >>> parse_path("callbacks[2].prompts[0]")
        (Key(name='callbacks'), Index(position=2), Key(name='prompts'), Index(position=0))
    """
    steps: list[Key | Index] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        # `callbacks[2]prompts` lacks its dot.
        if match is None or (at > 0 and match[1] and text[at] != "."):
            raise GraphError(
                f"{text!r} is not a graph path: cannot read it from column {at + 1}",
                code="FG310",
                hint="write it as trainer.args.lr or callbacks[2].prompts[0]",
            )
        steps.append(_step(match, text))
        at = match.end()
    if not steps:
        raise GraphError("an empty graph path", code="FG310", hint="write it as trainer.args.lr")
    return tuple(steps)


def _step(match: re.Match[str], text: str) -> Key | Index:
    if match[1] is not None:
        return Key(match[1])
    if match[2] is not None:
        return Index(int(match[2]))
    if match[3] is not None:
        return Key(re.sub(r"\\(.)", r"\1", match[3]))
    try:
        # Keys that are not strings are written as Python literals: `[key 1]`, `[key ('a', 2)]`.
        return Key(literal_eval(match[4] or "no literal"))
    except (ValueError, SyntaxError):
        body = match[4] or match[5]
        raise GraphError(
            f"{text!r} is not a graph path: [{body}] is neither a position nor a quoted key",
            code="FG310",
            hint=f"quote the key: ['{body}']",
        ) from None
