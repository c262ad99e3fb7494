"""The exception classes, and the `Diagnostic` record.

The facts of an error are fields (code, message, span, path, hint, expected, found). Pickling preserves them, because
errors cross process boundaries. `str(error)` is one line plus a hint; `cli/output.py` prints the report with the source
line. Every code has a page in `docs/errors/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from forgather.source import Span
from forgather.spelling import close_matches, same_letters


class Severity(StrEnum):
    """The severity of a finding: errors stop a run, `train` shows warnings and notes, and only `check` shows lints."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    LINT = "lint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding about a configuration.

    Args:
        code: the error code, as in "FG204", which does not change between releases.
        message: a description of what was found, on one line.
        severity: the severity: error, warning, note (nothing is wrong) or lint.
        span: the place in the user's file.
        path: the path in the object graph of the config; None if the finding has no such path.
        hint: a suggestion of what the user can do.
        context: the statements that led to the place, such as "config tiny.yaml" and "extends project.yaml".
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
    """Base class of every error that Forgather raises. All arguments except the message are optional keywords.

    Args:
        message: a description of what was found, on one line.
        code: the error code; each class has a default.
        span: the place in the user's file.
        path: the path in the object graph of the config.
        hint: a suggestion of what the user can do.
        expected: the value or values that would have been accepted.
        found: the value that was found.
        context: the statements that led to the place, as in `Diagnostic`.
        others: further findings that belong in the same report.
    """

    code = "FG000"
    argument: str | None = None
    """The keyword argument to which an error of a constructor refers, or None. The report shows the line of the config
    that gives this argument. `args.lr` is the keyword `lr` of the call that is given as `args`.
    """

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
        """Returns this error, marked as an error about `argument`."""
        self.argument = argument
        return self

    def __str__(self) -> str:
        place = f"{self.span}: " if self.span else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}[{self.code}] {self.message}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default pickles `args` only, so that every keyword field would be lost between processes.
        return _restore, (type(self), self.message, dict(self.__dict__))

    @property
    def diagnostic(self) -> Diagnostic:
        """The fields of this error as a `Diagnostic`."""
        return Diagnostic(
            code=self.code,
            message=self.message,
            span=self.span,
            path=self.path,
            hint=self.hint,
            context=self.context,
        )


def _restore(cls: type[ForgatherError], message: str, fields: dict[str, Any]) -> ForgatherError:
    # Subclasses that also inherit a builtin have constructors with other signatures; the fields are restored without
    # them.
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class SyntaxFault(ForgatherError):
    """A line, block or Jinja tag that cannot be parsed."""

    code = "FG101"


class RenderError(ForgatherError):
    """A template failed while it was rendered."""

    code = "FG110"


class BudgetError(RenderError):
    """A template or document exceeded one of its budgets."""

    code = "FG120"


class LoadError(ForgatherError):
    """The rendered text is not a document of the configuration language."""

    code = "FG200"


class GraphError(ForgatherError):
    """A graph from which the requested objects cannot be built."""

    code = "FG300"


class UnboundVarError(GraphError, NameError):
    """A `!var` or `!env` that has neither a value nor a default."""

    code = "FG301"


class ArgumentError(GraphError, TypeError):
    """Arguments in the config that do not match the signature of their constructor."""

    code = "FG204"


class UnknownTargetError(GraphError, KeyError):
    """A target that the config does not define."""

    code = "FG302"

    __str__ = ForgatherError.__str__


class ResolveError(ForgatherError, ImportError):
    """A constructor that cannot be imported, or that its module does not have."""

    code = "FG320"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


class ProjectError(ForgatherError):
    """A project, workspace or config that is missing or malformed."""

    code = "FG400"


class PlanError(ForgatherError):
    """A question to the planner that has no answer: hardware that nobody knows, or a malformed description of it."""

    code = "FG994"


class ControlError(ForgatherError):
    """A request to a run that the run does not take, or does not do."""

    code = "FG516"


class CheckpointError(ForgatherError):
    """A checkpoint that is missing, incomplete or corrupt."""

    code = "FG600"


class DistributedError(ForgatherError):
    """Processes whose number, ranks or settings do not match."""

    code = "FG700"


class TrainingError(ForgatherError):
    """A training run that cannot start or continue."""

    code = "FG800"


class BuildNote(str):
    """A note on an exception that says which call of the configuration raised it.

    Args:
        constructor: the name of the constructor in the config.
        path: the path of the call in the object graph, as text.
        span: the place of the call in the user's file.
    """

    constructor: str
    path: str
    span: Span | None

    def __new__(cls, constructor: str, path: str, span: Span | None, *, act: str = "calling") -> BuildNote:
        """Returns the note; `act` is the verb phrase in its text, such as "calling"."""
        note = super().__new__(cls, f"while {act} {constructor} at {path} ({span or 'no source'})")
        note.constructor, note.path, note.span = constructor, path, span
        return note

    # Unpickling calls `__new__`, which needs these arguments instead of the text.
    def __getnewargs__(self) -> tuple[str, str, Span | None]:  # type: ignore[override]
        return self.constructor, self.path, self.span


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, or the name of its class if the text is empty.

    Example:
        >>> first_line(OSError("no connection\\nbacktrace")), first_line(KeyboardInterrupt())
        ('no connection', 'KeyboardInterrupt')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: str, candidates: Sequence[str], *, first: Sequence[str] = (), prefix: str = "") -> str | None:
    """Returns "did you mean 'x'?" for the closest candidate.

    If no candidate is close, the result is a list of all candidates if there are one to nine, and otherwise None.

    Args:
        name: the name that was written.
        candidates: the names that exist.
        first: the names that are preferred to the other candidates if one of them is close.
        prefix: a text that is written before each name in the result.

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
    # A longer list would hide the message.
    if listed and len(listed) < 10:
        return "one of: " + ", ".join(prefix + found for found in sorted(listed))
    return None


def closest(name: str, candidates: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the candidate that is most similar to a name, or None if no candidate is similar.

    A candidate that differs only in upper and lower case is preferred.

    Args:
        name: the name that was written.
        candidates: the names that exist.
        cutoff: the minimum similarity, from 0 to 1, as in `difflib.get_close_matches`.
    """
    return same_letters(name, candidates) or next(iter(close_matches(name, candidates, n=1, cutoff=cutoff)), None)
