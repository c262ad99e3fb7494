"""The events of a YAML document, as plain records.

Takes nothing; `_yaml` makes these, `compose` reads them. Keeps true: lines and columns are 1-based, and
nothing here knows which YAML library is in use.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from forgather.errors import GraphError
from forgather.source import Span

SCALAR, ALIAS, SEQUENCE, MAPPING, END = "scalar", "alias", "sequence", "mapping", "end"


class End(Protocol):
    """The place behind a piece of text, counted from 0 as parsers do."""

    @property
    def line(self) -> int:
        """Lines before it."""

    @property
    def column(self) -> int:
        """Characters before it on its line."""


class Place(NamedTuple):
    """A place that no parser made."""

    line: int
    column: int


class Event(NamedTuple):
    """One event.

    Args:
        kind: SCALAR, ALIAS, SEQUENCE, MAPPING or END (of a sequence or mapping).
        line: line of the rendered text.
        column: column of the rendered text.
        value: text of a scalar, name of an alias.
        tag: tag as written, escapes decoded; None without one.
        anchor: anchor name; None without one.
        plain: True for a scalar without quotes or block style.
        flow: True for a container in brackets.
        end: where the scalar or the tag ends; None where there is neither.
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
    """A value or tag that the language refuses; whoever knows the place makes an error of it.

    Args:
        code: stable code.
        message: what was found.
        hint: what can be done.
        span: the place, where it is known better than by whoever catches this.
    """

    def __init__(self, code: str, message: str, hint: str | None = None, *, span: Span | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.span = code, message, hint, span

    def located(self, span: Span | None, path: str) -> GraphError:
        """Returns the error of a value that is refused when it is built.

        Args:
            span: where the value is written.
            path: where it is in the graph.
        """
        return GraphError(self.message, code=self.code, span=span, path=path, hint=self.hint)


class YamlProblem(Exception):
    """The text is not one YAML document; `yaml_errors` turns it into an error for the user.

    Args:
        problem: what the parser met, in the parser's words.
        line: line of the rendered text.
        column: column of the rendered text.
        start: line on which the construct begins, where the parser tells.
    """

    def __init__(self, problem: str, line: int, column: int, start: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column, self.start = problem, line, column, start
