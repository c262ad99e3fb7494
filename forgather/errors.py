"""The error tree and the `Diagnostic` record.

Keeps true: an error is data first (code, message, span, path, hint, expected, found), survives pickling,
and prints as one line plus a hint. The framed report with the source line is drawn by `cli/output.py`.
Codes are listed, one page each, in `docs/errors/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from forgather.source import Span
from forgather.spelling import close_matches, same_letters


class Severity(StrEnum):
    """How bad a finding is: errors stop, `train` shows warnings and notes, lints are left to `check`."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    LINT = "lint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding about a configuration.

    Args:
        code: stable code, as in "FG204".
        message: what was found, on one line.
        severity: error, warning, note (nothing is wrong) or lint.
        span: where, in the user's file.
        path: graph path, where there is one.
        hint: what can be done.
        context: lines that say how the place was reached ("config tiny.yaml, extends project.yaml").
    """

    code: str
    message: str
    severity: Severity = Severity.ERROR
    span: Span | None = None
    path: str | None = None
    hint: str | None = None
    context: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{self.span}: " if self.span else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}{self.severity}[{self.code}]: {self.message}{hint}"


class ForgatherError(Exception):
    """Base of every error of ours. All arguments but the message are keywords, and all are optional.

    Args:
        message: what was found, on one line.
        code: stable code; each class has a default.
        span: place in the user's file.
        path: graph path.
        hint: what can be done.
        expected: what would have been accepted.
        found: what was there.
        context: how the place was reached.
        others: further findings that belong in the same report.
    """

    code = "FG000"
    argument: str | None = None
    """Name of the keyword that a constructor's own error is about; the error is placed where it is written. `args.lr`
    is the keyword `lr` of the call that is given as `args`."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        span: Span | None = None,
        path: str | None = None,
        hint: str | None = None,
        expected: Any = None,
        found: Any = None,
        context: Sequence[str] = (),
        others: Sequence[Diagnostic] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.span = span
        self.path = path
        self.hint = hint
        self.expected = expected
        self.found = found
        self.context = tuple(context)
        self.others = tuple(others)

    def about(self, argument: str) -> Self:
        """Returns this error, marked as one about `argument`."""
        self.argument = argument
        return self

    def __str__(self) -> str:
        place = f"{self.span}: " if self.span else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}[{self.code}] {self.message}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.message, dict(self.__dict__))

    @property
    def diagnostic(self) -> Diagnostic:
        """The same facts as a record."""
        return Diagnostic(
            code=self.code,
            message=self.message,
            span=self.span,
            path=self.path,
            hint=self.hint,
            context=self.context,
        )


def _restore(cls: type[ForgatherError], message: str, fields: dict[str, Any]) -> ForgatherError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class SyntaxFault(ForgatherError):
    """A line, block or Jinja tag that cannot be read."""

    code = "FG101"


class RenderError(ForgatherError):
    """A template failed while it was rendered."""

    code = "FG110"


class BudgetError(RenderError):
    """A template or document passed one of its budgets."""

    code = "FG120"


class LoadError(ForgatherError):
    """The rendered text is not a document of the language."""

    code = "FG200"


class GraphError(ForgatherError):
    """A graph that cannot be what was asked for."""

    code = "FG300"


class UnboundVarError(GraphError, NameError):
    """A `!var` or `!env` has neither a value nor a default."""

    code = "FG301"


class ArgumentError(GraphError, TypeError):
    """Arguments in the config that do not fit the signature of their constructor."""

    code = "FG204"


class UnknownTargetError(GraphError, KeyError):
    """A target that the config does not define."""

    code = "FG302"

    __str__ = ForgatherError.__str__


class ResolveError(ForgatherError, ImportError):
    """A constructor that cannot be imported or found."""

    code = "FG320"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


class ProjectError(ForgatherError):
    """A project, workspace or config that is missing or malformed."""

    code = "FG400"


class CheckpointError(ForgatherError):
    """A checkpoint that is missing, incomplete or corrupt."""

    code = "FG600"


class DistributedError(ForgatherError):
    """Processes that do not fit together."""

    code = "FG700"


class TrainingError(ForgatherError):
    """A training run that cannot start or go on."""

    code = "FG800"


class BuildNote(str):
    """Where in the configuration a constructor was being called; added to the exception that it raised.

    Args:
        constructor: the constructor as the config names it.
        path: graph path of the call, in text form.
        span: place of the call in the user's file.
    """

    constructor: str
    path: str
    span: Span | None

    def __new__(cls, constructor: str, path: str, span: Span | None, *, act: str = "calling") -> BuildNote:
        """Makes the note; `act` says what was being done."""
        note = super().__new__(cls, f"while {act} {constructor} at {path} ({span or 'no source'})")
        note.constructor, note.path, note.span = constructor, path, span
        return note

    def __getnewargs__(self) -> tuple[str, str, Span | None]:  # type: ignore[override]
        return self.constructor, self.path, self.span


def nearest(name: str, candidates: Sequence[str], *, first: Sequence[str] = (), prefix: str = "") -> str | None:
    """Returns "did you mean 'x'?" for the closest candidate, a short list where none is close, or None.

    Args:
        name: what was written.
        candidates: what exists.
        first: candidates that are meant rather than the others, where any of them is close.
        prefix: what stands before the names where they are written out.

    Example:
        >>> nearest("weigth_decay", ["lr", "weight_decay"])
        "did you mean 'weight_decay'?"
        >>> nearest("Adamw", ["Adam", "AdamW"])
        "did you mean 'AdamW'?"
        >>> nearest("zzz", ["lr", "eps"])
        'one of: eps, lr'
    """
    close = closest(name, first) or closest(name, candidates)
    if close:
        return f"did you mean {prefix + close!r}?"
    listed = first or candidates
    if listed and len(listed) < 10:
        return "one of: " + ", ".join(prefix + found for found in sorted(listed))
    return None


def closest(name: str, candidates: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the candidate that is most like a name; one of the same letters in another case before all others."""
    return same_letters(name, candidates) or next(iter(close_matches(name, candidates, n=1, cutoff=cutoff)), None)
