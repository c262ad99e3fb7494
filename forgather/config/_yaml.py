"""Text to YAML events; the only importer of ruamel.yaml.

Takes a text, gives `Event` records one by one. Keeps true: events only, never composed or constructed
nodes; one document without directives; every failure is a `YamlProblem` with a place; a value stands where
its tag or text begins, also when its anchor stands on a line before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from forgather.config.events import ALIAS, END, MAPPING, SCALAR, SEQUENCE, Event, Place, YamlProblem

SECOND_DOCUMENT = "a second document begins here"
DIRECTIVE = "a directive stands before the document"


def read_events(text: str) -> Iterator[Event]:
    """Yields the events of the single document in `text`.

    Raises:
        YamlProblem: the text is not YAML, has a directive, or holds a second document.
    """
    documents = 0
    lines = text.split("\n")
    try:
        for event in YAML(typ="safe", pure=False).parse(text):
            kind = _KINDS.get(type(event).__name__)
            if kind is not None:
                yield _event(kind, event, lines)
            elif type(event).__name__ == "DocumentStartEvent":
                documents += 1
                if documents > 1 or event.version or event.tags:
                    mark = event.start_mark
                    problem = SECOND_DOCUMENT if documents > 1 else DIRECTIVE
                    raise YamlProblem(problem, mark.line + 1, mark.column + 1)
    except MarkedYAMLError as error:
        raise _problem(error) from None
    except YAMLError as error:
        raise _unreadable(text, error) from None


_KINDS = {
    "ScalarEvent": SCALAR,
    "AliasEvent": ALIAS,
    "SequenceStartEvent": SEQUENCE,
    "MappingStartEvent": MAPPING,
    "SequenceEndEvent": END,
    "MappingEndEvent": END,
}


_ANCHOR_ALONE = re.compile(r"&\S+[ \t]*(#.*)?$")
_BLANK = re.compile(r"[ \t]")
_NO_CONTENT = re.compile(r"[ \t]*(#.*)?$")


def _event(kind: str, event: Any, lines: list[str]) -> Event:
    mark = event.start_mark
    line, column = mark.line + 1, mark.column + 1
    if kind is ALIAS:
        return Event(kind, line, column, event.anchor)
    if kind is END:
        return Event(kind, line, column)
    empty = kind is SCALAR and not (event.value or event.style or event.tag)
    if event.anchor is not None and not empty and _ANCHOR_ALONE.match(lines[line - 1], column - 1):
        line, column = _behind_anchor(lines, line, column)
    if kind is SCALAR:
        return Event(kind, line, column, event.value, event.tag, event.anchor, not event.style, False, event.end_mark)
    flow = bool(event.flow_style)
    if event.tag is None:
        return Event(kind, line, column, "", None, event.anchor, False, flow)
    behind = _BLANK.search(lines[line - 1] + " ", column)
    end = Place(line - 1, behind.start() if behind else column)
    return Event(kind, line, column, "", event.tag, event.anchor, False, flow, end)


def _behind_anchor(lines: list[str], line: int, column: int) -> tuple[int, int]:
    """Returns where the value begins whose anchor stands alone at (`line`, `column`)."""
    for number in range(line, len(lines)):
        if not _NO_CONTENT.match(lines[number]):
            return number + 1, len(lines[number]) - len(lines[number].lstrip()) + 1
    return line, column


def _problem(error: MarkedYAMLError) -> YamlProblem:
    mark = error.problem_mark or error.context_mark
    start = error.context_mark.line + 1 if error.context_mark else None
    words = ": ".join(part for part in (error.context, error.problem) if part)
    return YamlProblem(words, mark.line + 1 if mark else 1, mark.column + 1 if mark else 1, start)


def _unreadable(text: str, error: YAMLError) -> YamlProblem:
    offset = getattr(error, "position", None) or 0
    before = text[:offset]
    words = str(error).split("\n")[0]
    return YamlProblem(words, before.count("\n") + 1, offset - before.rfind("\n"))
