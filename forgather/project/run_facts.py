"""The facts in `run.json`, validated when they are read.

The input is the text of the file; the output is a dict. Every fact that is present has the type that a run writes, so
that later code need not check it; a fact may be missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

FACTS, GRAPH = "run.json", "graph.yaml"
FORM = 2
"""The number of the format of a run folder."""
_Kind = Callable[[Any], bool]


def is_run_folder(folder: str) -> bool:
    """Returns whether a folder contains the files of a run."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (FACTS, GRAPH))


def read_facts(text: str) -> dict[str, Any]:
    """Returns the facts of a run.

    Raises:
        ValueError: if the text is not a JSON object, or a fact has a wrong type.
    """
    try:
        found = dict(json.loads(text).items())
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("it is not a JSON object") from None
    for name, (kind, words) in _KINDS.items():
        value = found.get(name)
        if value is not None and not kind(value):
            raise ValueError(f"{name!r} is not a {words}")
    for name, value in found.items():
        # These texts are used as paths, and printed.
        if not all(map(_is_writable, _all_texts(value))):
            raise ValueError(f"{name!r} contains a character that neither a file name nor a text can contain")
    return found


def _all_texts(value: Any) -> Iterator[str]:
    # A stack instead of recursion: JSON can be nested deeper than Python recurses.
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            stack += [*inner, *inner.values()]
        elif isinstance(inner, list):
            stack += inner


def _is_writable(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_instant(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_text_table(value: Any) -> bool:
    return isinstance(value, dict) and all(item is None or isinstance(item, str) for item in value.values())


def _is_data(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_piece, value))


def _is_piece(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("named"), str)
        and isinstance(value.get("files"), dict)
        and all(
            isinstance(fact, dict) and {"size", "mtime_ns", "digest"} <= fact.keys() for fact in value["files"].values()
        )
    )


_TEXT, _LIST, _TABLE = (_is_text, "string"), (_is_list, "list of strings"), (_is_table, "mapping")
_TEXTS: tuple[_Kind, str] = (_is_text_table, "mapping of strings")
_KINDS: dict[str, tuple[_Kind, str]] = {
    "form": (_is_count, "number"),
    **dict.fromkeys(("project", "project_dir", "workspace_root", "library", "config", "template", "output_dir"), _TEXT),
    "hostname": _TEXT,
    "instant": (_is_instant, "time"),
    **dict.fromkeys(("uname", "versions", "files", "redacted"), _TEXTS),
    **dict.fromkeys(("processors", "git", "environment_read", "environment_needed"), _TABLE),
    **dict.fromkeys(("search_path", "system_path"), _LIST),
    "data": (_is_data, "list of what was read"),
}
