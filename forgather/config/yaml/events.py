"""The events of a YAML document as plain records, and the errors of reading it.

`parser` makes the events, `compose` reads them. Invariants: lines and columns count from 1; nothing here depends on the
YAML library.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from forgather.errors import GraphError
from forgather.source import Span

SCALAR, ALIAS, SEQUENCE, MAPPING, END = "scalar", "alias", "sequence", "mapping", "end"


class End(Protocol):
    """The place after a piece of text, counted from 0 as parsers do."""

    @property
    def line(self) -> int:
        """Lines before it."""

    @property
    def column(self) -> int:
        """Characters before it on its line."""


class EndMark(NamedTuple):
    """An `End` that was computed instead of read from the parser."""

    line: int
    column: int


class Event(NamedTuple):
    """One event.

    Args:
        kind: SCALAR, ALIAS, SEQUENCE, MAPPING or END (of a sequence or mapping).
        line: line of the rendered text.
        column: column of the rendered text.
        value: text of a scalar, name of an alias.
        tag: tag as written, with escapes decoded; None if there is none.
        anchor: name of the anchor; None if there is none.
        plain: True for a scalar without quotes or block style.
        flow: True for a container in brackets.
        end: where the scalar or the tag ends; None if there is neither.
    """

    kind: str
    line: int
    column: int
    value: str = ""
    tag: str | None = None
    anchor: str | None = None
    plain: bool = False
    flow: bool = False
    end: End | None = None


class Refusal(ValueError):
    """A value or tag that the language refuses; the caller that knows the place turns it into an error.

    Args:
        code: stable code.
        message: what was found.
        hint: what can be done.
        span: a more exact place than that of the caller; None if there is none.
    """

    def __init__(self, code: str, message: str, hint: str | None = None, *, span: Span | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.span = code, message, hint, span

    def located(self, span: Span | None, path: str) -> GraphError:
        """Returns the error for a value that is refused during construction.

        Args:
            span: where the value is written.
            path: its path in the graph.
        """
        # A refusal during construction is not an error of loading, although the message is the same.
        return GraphError(self.message, code=self.code, span=span, path=path, hint=self.hint)


class YamlProblem(Exception):
    """The text is not one YAML document; `yaml_errors` turns this into an error for the user.

    Args:
        problem: the parser's message.
        line: line of the rendered text.
        column: column of the rendered text.
        start: line on which the construct begins; None if the parser does not report it.
    """

    def __init__(self, problem: str, line: int, column: int, start: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column, self.start = problem, line, column, start
