"""Draws errors and warnings, and writes what commands give.

Takes errors and text, gives lines on the terminal or in a file. Keeps true: one report is at most eighteen lines,
with the user's own line in it; what a text shows of colors and width is up to `palette`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any, NamedTuple, TextIO, cast

from forgather.cli.palette import Look, hang_of_finding, paint_finding, shown_on, wants_color, width_of
from forgather.cli.source_excerpt import clean, excerpt, visible
from forgather.errors import BuildNote, Diagnostic, ForgatherError, ProjectError, Severity
from forgather.project.path_display import Display
from forgather.redaction import hide
from forgather.source import Span

MAX_LINES = 18
_WIDTH = 160
# What has no lines: an option, or a variable that was given in Python.
NO_LINES = ("<option ", "<variable ")


def report(findings: Sequence[Diagnostic], display: Display, see_all: str | None = None) -> list[str]:
    """Returns the lines that show findings: as many as fit in one screen, the rest as a count.

    Args:
        findings: what to show; a way to a template that several of them share is told once.
        display: names files.
        see_all: the command that shows those that do not fit.
    """
    lines: list[str] = []
    told: set[str] = set()
    for position, finding in enumerate(findings):
        fresh = tuple(part for part in finding.context if part not in told)
        block = _block(replace(finding, context=fresh), display)
        told.update(fresh)
        remaining = len(findings) - position
        if lines and len(lines) + len(block) + (remaining > 1) > MAX_LINES:
            lines.append(f"  ... and {remaining} more" + (f": '{see_all}' shows all" if see_all else ""))
            break
        lines += block
    return lines


def _block(finding: Diagnostic, display: Display) -> list[str]:
    message = clean(display.shorten(finding.message), 4 * _WIDTH).split("\n")
    lines = [f"{finding.severity}[{finding.code}]: {message[0]}", *(f"  {line}" for line in message[1:4])]
    if finding.severity is not Severity.ERROR and finding.span is not None and finding.span.file.startswith("<"):
        # About what was typed on the command line a moment ago: the message is enough.
        return lines
    if finding.span is not None:
        lines += _place(finding.span, display, finding)
    context = display.shorten(", ".join(finding.context))
    where = [part for part in (finding.path, f"({context})" if finding.path and context else context) if part]
    if where:
        lines.append("  in  " + clean("      ".join(where), 2 * _WIDTH))
    if finding.hint:
        lines.append("  help: " + clean(display.shorten(finding.hint), 2 * _WIDTH).replace("\n", " "))
    return lines


def _place(span: Span, display: Display, finding: Diagnostic | None = None) -> list[str]:
    if span.file.startswith(NO_LINES):
        return [f"  --> {span.file[1:-1]}"]
    number = str(span.line)
    # A terminal that broke the line would take the caret away from below its value.
    room = min(_WIDTH, (width_of(sys.stderr) if sys.stderr else None) or _WIDTH + 10) - len(number) - 9
    shown = excerpt(span, max(room, 40), finding)
    margins = (f"      {number} | ", f"      {'':{len(number)}} | ")
    return [f"  --> {display(span.file)}:{number}", *map("".join, zip(margins, shown, strict=False))]


def in_brief(text: str, limit: int = 2 * _WIDTH) -> str:
    """Returns text without characters that steer a terminal, cut to `limit`."""
    return clean(text, limit)


def findings_of(error: ForgatherError) -> list[Diagnostic]:
    """Returns what an error says, and the further findings that belong to it."""
    first = _placed(error)
    others = [other for other in error.others if (other.code, other.message, other.span) != _key(first)]
    return [first, *others]


def _placed(error: ForgatherError) -> Diagnostic:
    """The error as a record; one that a constructor raised takes its place from the call in the config."""
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, BuildNote)]
    found = error.diagnostic
    if not notes:
        return found
    return replace(found, span=found.span or notes[0].span, path=found.path or notes[0].path)


def _key(finding: Diagnostic) -> tuple[object, ...]:
    return finding.code, finding.message, finding.span


def print_error(error: ForgatherError, project_dir: str | None = None, see_all: str | None = None) -> None:
    """Draws an error of ours on the error stream; `see_all` is the command that shows all of several."""
    display = Display(project_dir)
    _print_lines(report(findings_of(error), display, see_all), _reported(display))


def print_crash(error: BaseException, project_dir: str | None = None) -> None:
    """Draws an exception that a constructor or a run raised: what, where in the config, where in the code."""
    # `traceback` costs more than `fgcli --help` may.
    from forgather.cli.traceback_trim import crash_lines

    display = Display(project_dir)
    _print_lines(crash_lines(error, display, place=_place), _reported(display))


def print_findings(findings: Iterable[Diagnostic], project_dir: str | None = None, see_all: str | None = None) -> bool:
    """Draws errors, warnings and notes on the error stream, no lints. Returns whether any is an error."""
    shown = [finding for finding in findings if finding.severity is not Severity.LINT]
    errors = [finding for finding in shown if finding.severity is Severity.ERROR]
    if shown:
        warnings = [finding for finding in shown if finding.severity is Severity.WARNING]
        notes = [finding for finding in shown if finding.severity is Severity.NOTE]
        display = Display(project_dir)
        _print_lines(report([*errors, *warnings, *notes], display, see_all), _reported(display))
    return bool(errors)


def _reported(display: Display) -> Look:
    return Look(paint_finding, hang_of_finding, display.named)


def plural(count: int, one: str, many: str | None = None) -> str:
    """Returns a count with its noun.

    Example:
        >>> plural(1, "checkpoint"), plural(2, "checkpoint"), plural(3, "copy", "copies")
        ('1 checkpoint', '2 checkpoints', '3 copies')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def print_note(text: str) -> None:
    """Prints one line on the error stream, for people."""
    _print_lines([text])


def write_text(text: str, file: str | None = None, *, look: Look | None = None) -> None:
    """Writes text to a file, or to the terminal where none is named.

    Args:
        text: what to write; a missing last line end is added.
        file: where to; None for the standard output.
        look: how its lines are shown on a terminal; None shows them as they are.

    Raises:
        ProjectError: the file cannot be written.
    """
    text = hide(text if text.endswith("\n") else f"{text}\n")
    if file is None:
        if sys.stdout is None:
            raise ProjectError("the standard output is closed", code="FG418", hint="write to a file with -o FILE")
        # What a config says must not steer the terminal; a file or another program gets it as it is.
        shown = visible(text) if _for_people() else text
        if look is not None:
            shown = "\n".join(shown_on(sys.stdout, line, look) for line in shown.split("\n"))
        _send(shown)
        flush_output()
        return
    try:
        with open(file, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as stream:
            stream.write(text)
    except OSError as error:
        raise ProjectError(
            f"{file!r} cannot be written: {error.strerror or error}",
            code="FG418",
            hint="name a file in a folder that exists and that you can write to",
        ) from error
    if os.path.isfile(file):
        print_note(f"wrote {in_brief(file)}")


def _send(text: str) -> None:
    try:
        sys.stdout.write(_encodable(text, sys.stdout))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _no_output(error) from None


class Line(NamedTuple):
    """One line that is shown in its own way.

    Args:
        text: the line.
        paint: gives it its colors.
        hang: columns before its further parts, where it is broken.
    """

    text: str
    paint: Callable[[str], str] | None = None
    hang: int = 4


def write_lines(lines: Iterable[Line], file: str | None = None, *, files: Mapping[str, str] | None = None) -> None:
    """Writes lines, each in its own way on a terminal.

    Args:
        lines: what to write.
        file: name of a file; None writes to the terminal.
        files: absolute paths by the names that stand for them.
    """
    found = list(lines)
    if file is not None or sys.stdout is None or not _for_people():
        write_text("\n".join(line.text for line in found), file)
        return
    for line in found:
        look = Look(line.paint, lambda _, hang=line.hang: hang, files or {})  # type: ignore[misc]
        _send(shown_on(sys.stdout, visible(hide(line.text)), look) + "\n")
    flush_output()


def write_findings(lines: Iterable[str], files: Mapping[str, str] | None = None) -> None:
    """Writes the lines of findings; `files` has absolute paths by the names that stand for them."""
    write_text("\n".join(lines), look=Look(paint_finding, hang_of_finding, files or {}))


def columns() -> int | None:
    """Returns the width of the terminal that the output goes to; None where it goes elsewhere."""
    return width_of(sys.stdout) if sys.stdout is not None else None


def _for_people() -> bool:
    return sys.stdout.isatty() or wants_color(sys.stdout)


def flush_output() -> None:
    """Sends what was written to where it goes.

    Raises:
        ProjectError: it cannot be written there; nothing more is tried.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _no_output(error) from None


def open_closed_streams() -> None:
    """Gives code that is not ours a place to write to, where the caller has closed the standard streams."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends


@contextmanager
def without_library_bars(*, speaks: bool) -> Iterator[None]:
    """Within, `datasets` draws no progress bars unless they go to a terminal: a log would get a line for each update.

    Args:
        speaks: whether this process is the one of several that prints.
    """
    name = "HF_DATASETS_DISABLE_PROGRESS_BARS"
    if name in os.environ or (speaks and sys.stderr.isatty()):
        yield
        return
    # The variable, because `datasets` is not imported yet, and processes that a command starts inherit it.
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def outlasting_readers() -> Iterator[None]:
    """Within, a reader that leaves (`fgcli train | head`), or a full disk, ends the printing and not the run."""
    before = sys.stdout
    ours = cast(TextIO, _Outlasting(before))
    sys.stdout = ours
    try:
        yield
    finally:
        if sys.stdout is ours:
            sys.stdout = before


class _Outlasting:
    """A stream that drops what nobody reads any more; it is the stream that it stands for in all else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        _silence(self._stream)
        left = isinstance(error, BrokenPipeError)
        why = "nobody reads the output any more" if left else f"the output cannot be written: {error.strerror or error}"
        print_note(f"{why}: the run goes on, and its files say the rest")


def flush_reports() -> None:
    """Sends what was reported to where it goes; where that is full, the exit status alone tells."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def silence_output() -> None:
    """Drops what is still unwritten, so that the interpreter does not try it again when it ends."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _no_output(error: OSError) -> ProjectError:
    silence_output()
    message = f"the standard output cannot be written: {error.strerror or error}"
    return ProjectError(message, code="FG418", hint="make room where it goes, or write to a file with -o FILE")


def write_json(facts: Any, file: str | None = None) -> None:
    """Writes facts as JSON, the same way everywhere."""
    write_text(json.dumps(facts, indent=2, ensure_ascii=False, default=str), file)


def _print_lines(lines: Iterable[str], look: Look | None = None) -> None:
    flush_output()
    if sys.stderr is None:
        return
    # A report that nobody can read is no reason to fail, or to fail in another way.
    with suppress(OSError):
        for line in map(visible, map(hide, lines)):
            shown = line if look is None else shown_on(sys.stderr, line, look)
            sys.stderr.write(_encodable(shown, sys.stderr) + "\n")
        sys.stderr.flush()


def _encodable(text: str, stream: IO[str]) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
