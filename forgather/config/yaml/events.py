"""The events of a YAML document as plain records, and the exceptions for a document that cannot be read.

`parser` makes the events, `compose` reads them. Invariants: lines and columns of events count from 1; the module does
not depend on the YAML library.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from forgather.errors import GraphError
from forgather.source import Span

SCALAR, ALIAS, SEQUENCE, MAPPING, END = "scalar", "alias", "sequence", "mapping", "end"


class End(Protocol):
    """The place after a piece of text; its line and column are counted from 0, as in the YAML libraries."""

    @property
    def line(self) -> int:
        """The number of lines before the place."""

    @property
    def column(self) -> int:
        """The number of characters before the place on its line."""


class EndMark(NamedTuple):
    """An `End` that was computed instead of read from the parser."""

    line: int
    column: int


class Event(NamedTuple):
    """One event of a YAML document.

    Args:
        kind: the kind: SCALAR, ALIAS, SEQUENCE, MAPPING or END (of a sequence or mapping).
        line: the line in the rendered text, counted from 1.
        column: the column in the rendered text, counted from 1.
        value: the text of a scalar, or the name of an alias.
        tag: the tag as written, with escapes decoded; None if there is no tag.
        anchor: the name of the anchor; None if there is no anchor.
        plain: whether the event is a scalar without quotes or block style.
        flow: whether the event is a container in brackets.
        end: the place at which the scalar or the tag ends; None if the event has neither.
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
    """Raised for a value or a tag that the config language refuses. The caller, which knows the place of the value,
    turns the exception into a located error.

    Args:
        code: the error code.
        message: a description of what was found.
        hint: a suggestion of what the user can do.
        span: the place of the refused part, if it is more exact than the place of the whole event or value; None to
            report the place of the event or value, which the caller knows.
    """

    def __init__(self, code: str, message: str, hint: str | None = None, *, span: Span | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.span = code, message, hint, span

    def located(self, span: Span | None, path: str) -> GraphError:
        """Returns the error for a value that is refused during construction.

        Args:
            span: the place of the value in the user's file.
            path: the path of the value in the graph.
        """
        # A refusal during construction is not an error of loading, although the message is the same.
        return GraphError(self.message, code=self.code, span=span, path=path, hint=self.hint)


class YamlProblem(Exception):
    """The text is not one YAML document; `yaml_errors` turns this into an error for the user.

    Args:
        problem: the message of the parser.
        line: the line in the rendered text, counted from 1.
        column: the column in the rendered text, counted from 1.
        start: the line on which the failing construct begins; None if the parser does not report this line.
    """

    def __init__(self, problem: str, line: int, column: int, start: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column, self.start = problem, line, column, start
