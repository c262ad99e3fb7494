"""Plain values from YAML text, for the filter `fromyaml`.

The input is a text of a template; the output is mappings, lists and scalars. Invariants: the text is data, so a tag,
an anchor, an alias or a repeated key is refused, with the line that wrote it; keys and other strings keep their
origins, so that a finding about a setting that a template copies points at the file that it was read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgather.config._jinja.origins import Traced, cut
from forgather.config.yaml.events import ALIAS, END, SCALAR, SEQUENCE, Event, Refusal, YamlProblem
from forgather.config.yaml.parser import read_events
from forgather.config.yaml.scalars import resolve_scalar
from forgather.errors import RenderError

_HINT = "the text of 'fromyaml' may hold mappings, lists, strings, numbers, true, false and null"


def plain_data(text: str, max_digits: int) -> Any:
    """Returns the value of a YAML document that holds plain data.

    Args:
        text: the text of the document; the value of an empty text is None.
        max_digits: the number of digits that an integer may have.

    Raises:
        RenderError: FG970 if the text is not YAML, or holds something other than plain data.

    Example:
        >>> plain_data("lora: {r: 64, names: [q_proj]}", 100)
        {'lora': {'r': 64, 'names': ['q_proj']}}
    """
    return _Document(text, max_digits).value()


class _Document:
    """A YAML text whose events become plain values."""

    def __init__(self, text: str, max_digits: int) -> None:
        self._text, self._max_digits = text, max_digits
        self._starts = [0]
        for line in str(text).split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        try:
            # libyaml takes no subclass of str.
            self._events = iter(list(read_events(str(text))))
        except YamlProblem as problem:
            raise self._fault(problem.line, f"the text is not YAML: {problem.problem}") from None

    def value(self) -> Any:
        event = next(self._events, None)
        return None if event is None else self._value(event)

    def _value(self, event: Event) -> Any:
        if event.kind is ALIAS or event.anchor is not None or event.tag is not None:
            what = "a tag" if event.tag is not None else "an anchor or an alias"
            raise self._fault(event.line, f"the text holds {what}, which is not plain data")
        if event.kind is SCALAR:
            return self._scalar(event)
        if event.kind is SEQUENCE:
            return [self._value(item) for item in self._until_end()]
        found: dict[Any, Any] = {}
        for item in self._until_end():
            key = self._value(item)
            if isinstance(key, list | dict) or (item.plain and key == "<<"):
                raise self._fault(item.line, f"{key!r} cannot be a key of plain data")
            if key in found:
                raise self._fault(item.line, f"{key!r} is written twice")
            found[key] = self._value(next(self._events))
        return found

    def _until_end(self) -> Iterator[Event]:
        while (event := next(self._events)).kind is not END:
            yield event

    def _scalar(self, event: Event) -> Any:
        try:
            value = resolve_scalar(event.value, self._max_digits) if event.plain else event.value
        except Refusal as refusal:
            raise self._fault(event.line, refusal.message, refusal.hint) from None
        if not isinstance(value, str):
            return value
        # The text of a string follows its quote, if it has one. A string with escapes is no part of the text.
        begin = self._starts[event.line - 1] + event.column - (1 if event.plain else 0)
        part = cut(self._text, begin, begin + len(value))
        return part if part == value else value

    def _fault(self, line: int, message: str, hint: str | None = None) -> RenderError:
        """Returns an error at the line of the file that wrote a line of the text, if it is known."""
        trail = self._text.trail_at(self._starts[line - 1]) if isinstance(self._text, Traced) else ((),)
        # The last place is the innermost: the template that contains the line.
        span = trail[0][-1][0].span(trail[0][-1][1]) if trail[0] else None
        return RenderError(message, code="FG970", span=span, hint=hint or _HINT)
