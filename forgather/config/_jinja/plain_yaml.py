"""Plain values from YAML text, for the filter `fromyaml`.

The input is a text of a template, and optionally the form that it must have; the output is mappings, lists and scalars.
Invariants: the text is data, so a tag, an anchor, an alias or a repeated key is refused, with the line that wrote it,
and so is what does not have the form; keys and other strings keep their origins, so that a finding about a setting that
a template copies points at the file that it was read from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forgather.config._jinja.origins import Traced, cut
from forgather.config.yaml.events import ALIAS, END, SCALAR, SEQUENCE, Event, Refusal, YamlProblem
from forgather.config.yaml.parser import read_events
from forgather.config.yaml.scalars import resolve_scalar
from forgather.errors import RenderError
from forgather.rule_conditions import accepted_values, misfit

_HINT = "the text of 'fromyaml' may hold mappings, lists, strings, numbers, true, false and null"


def plain_data(text: str, max_digits: int, form: Any = None) -> Any:
    """Returns the value of a YAML document that holds plain data.

    Args:
        text: the text of the document; the value of an empty text is None.
        max_digits: the number of digits that an integer may have.
        form: the keys that must be there, as a mapping to the forms of their values; further keys are allowed. The form
            of a scalar is a constraint as those of settings (`misfit`), written as "whole", or "whole from 1" for one
            that is not below 1. None allows every value.

    Raises:
        RenderError: FG970 if the text is not YAML, or holds something other than plain data; FG952 if it does not have
            the form.

    Example:
        >>> plain_data("lora: {r: 64, names: [q_proj]}", 100)
        {'lora': {'r': 64, 'names': ['q_proj']}}
    """
    return _Document(text, max_digits).value(form)


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

    def value(self, form: Any) -> Any:
        event = next(self._events, None)
        if event is None and form is not None:
            raise self._fault(1, "the text is empty", _expected(form), code="FG952")
        return None if event is None else self._value(event, form, "the text")

    def _value(self, event: Event, form: Any = None, name: str = "") -> Any:
        """Returns the value that begins with an event; `name` is what messages call it."""
        if event.kind is ALIAS or event.anchor is not None or event.tag is not None:
            what = "a tag" if event.tag is not None else "an anchor or an alias"
            raise self._fault(event.line, f"the text holds {what}, which is not plain data")
        if event.kind is SCALAR:
            value = self._scalar(event)
            if form is not None and (isinstance(form, Mapping) or misfit(value, _constraint(form)) is not None):
                what = "empty" if value is None else repr(str(value) if isinstance(value, str) else value)[:60]
                raise self._fault(event.line, f"{name} is {what}", _expected(form), code="FG952")
            return value
        kind = "list" if event.kind is SEQUENCE else "mapping"
        if form is not None and kind != ("mapping" if isinstance(form, Mapping) else form):
            raise self._fault(event.line, f"{name} is a {kind}", _expected(form), code="FG952")
        if event.kind is SEQUENCE:
            return [self._value(item) for item in self._until_end()]
        found: dict[Any, Any] = {}
        inner = form if isinstance(form, Mapping) else {}
        for item in self._until_end():
            key = self._value(item)
            if isinstance(key, list | dict) or (item.plain and key == "<<"):
                raise self._fault(item.line, f"{key!r} cannot be a key of plain data")
            if key in found:
                raise self._fault(item.line, f"{key!r} is written twice")
            found[key] = self._value(next(self._events), inner.get(key), repr(str(key)))
        for key, wanted in inner.items():
            if key not in found:
                raise self._fault(event.line, f"{name} has no {key!r}", f"add it: {_expected(wanted)}", code="FG952")
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

    def _fault(self, line: int, message: str, hint: str | None = None, code: str = "FG970") -> RenderError:
        """Returns an error at the line of the file that wrote a line of the text, if it is known."""
        trail = self._text.trail_at(self._starts[line - 1]) if isinstance(self._text, Traced) else ((),)
        # The last place is the innermost: the template that contains the line.
        span = trail[0][-1][0].span(trail[0][-1][1]) if trail[0] else None
        return RenderError(message, code=code, span=span, hint=hint or _HINT)


def _constraint(form: str) -> Mapping[str, Any]:
    """Returns the constraint that a form such as "whole from 1" stands for."""
    kind, _, lowest = form.partition(" from ")
    return {"type": kind, **({"minimum": int(lowest)} if lowest else {})}


def _expected(form: Any) -> str:
    if isinstance(form, Mapping):
        return f"expected a mapping with {', '.join(form)}"
    return f"expected {accepted_values(_constraint(form))}"
