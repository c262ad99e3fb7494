"""Parses YAML text into events; the only importer of ruamel.yaml.

The input is a text; the output is `Event` records, one by one. Invariants: only ruamel's parser is used, because its
composer refuses re-used anchors and recurses; libyaml parses the text, and the pure Python parser takes over where
libyaml wrongly refuses a text such as `[12:30]`; there is one document without directives; every failure is a
`YamlProblem` with a place; the place of a value is that of its tag or text, even if its anchor is on a line before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from forgather.config.yaml.events import ALIAS, END, MAPPING, SCALAR, SEQUENCE, EndMark, Event, YamlProblem

# The pure parser reads some 50,000 characters in a second.
_MAX_PURE_CHARS = 60_000
SECOND_DOCUMENT = "a second document begins here"
DIRECTIVE = "a directive before the document"


def read_events(text: str) -> Iterator[Event]:
    """Yields the events of the single document in `text`.

    Raises:
        YamlProblem: if the text is not YAML, has a directive, or contains a second document.
    """
    count = 0
    try:
        for event in _parsed(text, pure=False):
            # The pure parser starts from the beginning again, and its first `count` events were already given.
            count += 1
            yield event
    except YamlProblem as problem:
        if not _may_be_plain(text, problem):
            raise
        yield from _from_the_pure_parser(text, count, problem)


def _from_the_pure_parser(text: str, count: int, problem: YamlProblem) -> Iterator[Event]:
    """Yields the events after the point at which libyaml failed, from the pure Python parser.

    Args:
        text: the text of the document.
        count: the number of events that libyaml has given.
        problem: the failure of libyaml, which is raised again if the pure parser does not get further.
    """
    before: Event | None = None
    try:
        for number, event in enumerate(_parsed(text, pure=True)):
            if before is not None and before.plain and ":" in before.value and _is_odd(before, event):
                raise problem
            before = event
            if number >= count:
                yield event
    except YamlProblem as other:
        # Both parsers failed: the one that got further is about the real mistake.
        raise (other if (other.line, other.column) > (problem.line, problem.column) else problem) from None


def _is_odd(scalar: Event, behind: Event) -> bool:
    """Returns whether a scalar with a ':' was probably meant as a key and its value, as in `{lr:3}` and `[lr:]`."""
    return re.search(r"[^:]:$", scalar.value) is not None or (
        behind.kind is SCALAR and behind.plain and not behind.value
    )


def _may_be_plain(text: str, problem: YamlProblem) -> bool:
    """Returns whether libyaml failed at a ':' or '?' that may be part of a scalar; it refuses both in brackets."""
    lines = text.split("\n")
    line = lines[problem.line - 1] if problem.line <= len(lines) else ""
    return len(text) <= _MAX_PURE_CHARS and any(
        re.match(r"[:?][^\s,\[\]{}]", line[at : at + 2]) for at in (problem.column - 1, problem.column - 2) if at >= 0
    )


def _parsed(text: str, *, pure: bool) -> Iterator[Event]:
    documents = 0
    lines = text.split("\n")
    try:
        # `parse` and never `compose`: composing refuses re-used anchors, crashes on deep nesting and accepts cycles.
        for event in YAML(typ="safe", pure=pure).parse(text):
            kind = _KINDS.get(type(event))
            if kind is not None:
                yield _event(kind, event, lines)
            elif isinstance(event, events.DocumentStartEvent):
                documents += 1
                if documents > 1 or event.version or event.tags:
                    mark = event.start_mark
                    problem = SECOND_DOCUMENT if documents > 1 else DIRECTIVE
                    raise YamlProblem(problem, mark.line + 1, mark.column + 1)
    except MarkedYAMLError as error:
        raise _problem(error) from None
    except YAMLError as error:
        raise _unreadable(text, error) from None


_KINDS: dict[type, str] = {
    events.ScalarEvent: SCALAR,
    events.AliasEvent: ALIAS,
    events.SequenceStartEvent: SEQUENCE,
    events.MappingStartEvent: MAPPING,
    events.SequenceEndEvent: END,
    events.MappingEndEvent: END,
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
    # The null of `key: &x` is at its anchor; there is no text below that could be its place.
    empty = kind is SCALAR and not (event.value or event.style or event.tag)
    if event.anchor is not None and not empty and _ANCHOR_ALONE.match(lines[line - 1], column - 1):
        # libyaml marks a value at its anchor, but the user looks for the tag or text below.
        line, column = _behind_anchor(lines, line, column)
    if kind is SCALAR:
        return Event(kind, line, column, event.value, event.tag, event.anchor, not event.style, False, event.end_mark)
    flow = bool(event.flow_style)
    if event.tag is None:
        return Event(kind, line, column, "", None, event.anchor, False, flow)
    behind = _BLANK.search(lines[line - 1] + " ", column)
    end = EndMark(line - 1, behind.start() if behind else column)
    return Event(kind, line, column, "", event.tag, event.anchor, False, flow, end)


def _behind_anchor(lines: list[str], line: int, column: int) -> tuple[int, int]:
    """Returns the line and the column of a value whose anchor is alone on the line `line`."""
    for number in range(line, len(lines)):
        if not _NO_CONTENT.match(lines[number]):
            return number + 1, len(lines[number]) - len(lines[number].lstrip()) + 1
    return line, column


def _problem(error: MarkedYAMLError) -> YamlProblem:
    # Some errors of ruamel have only one of the two marks.
    mark = error.problem_mark or error.context_mark
    start = error.context_mark.line + 1 if error.context_mark else None
    words = ": ".join(part for part in (error.context, error.problem) if part)
    return YamlProblem(words, mark.line + 1 if mark else 1, mark.column + 1 if mark else 1, start)


def _unreadable(text: str, error: YAMLError) -> YamlProblem:
    offset = getattr(error, "position", None) or 0
    before = text[:offset]
    words = str(error).split("\n")[0]
    return YamlProblem(words, before.count("\n") + 1, offset - before.rfind("\n"))
