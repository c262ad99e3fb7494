"""Prints errors and warnings, and writes the output of commands to the terminal or to a file.

A report of errors is limited to the lines that fit on one screen, and shows the line of the user's file. Secrets are
hidden in everything that is written. The module `palette` decides on colors and line breaks.
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
from forgather.replaced_file import write_whole
from forgather.source import Span

MAX_LINES = 18  # a report has to fit on one screen, together with the command
_WIDTH = 160
NO_LINES = ("<option ", "<variable ")  # an option, or a variable that was given in Python


def report(findings: Sequence[Diagnostic], display: Display, see_all: str | None = None) -> list[str]:
    """Returns the lines of a report: as many findings as fit on one screen, and the number of the remaining ones.

    Args:
        findings: the findings. Context that several of them have in common, such as included files, is printed once.
        display: the object that shortens the names of files.
        see_all: the command that lists all findings, or None if there is no such command.
    """
    lines: list[str] = []
    shown_parts: set[str] = set()
    for position, finding in enumerate(findings):
        # Findings of one config have the same chain of templates, which would fill the screen.
        fresh = tuple(part for part in finding.context if part not in shown_parts)
        block = _block(replace(finding, context=fresh), display)
        shown_parts.update(fresh)
        remaining = len(findings) - position
        if lines and len(lines) + len(block) + (remaining > 1) > MAX_LINES:
            lines.append(f"  ... and {remaining} more" + (f": '{see_all}' shows all" if see_all else ""))
            break
        lines += block
    return lines


def _block(finding: Diagnostic, display: Display) -> list[str]:
    message = clean(display.shorten(finding.message), 4 * _WIDTH).split("\n")
    lines = [f"{finding.severity}[{finding.code}]: {message[0]}", *(f"  {line}" for line in message[1:4])]
    is_note = finding.severity is Severity.NOTE or (finding.severity is Severity.WARNING and finding.path is None)
    if is_note and finding.span is not None and finding.span.file.startswith("<"):
        # A note about a word of the command line needs no place: the word is still on the screen.
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
    # If the terminal wrapped the line, the caret would no longer be below its value.
    room = min(_WIDTH, (width_of(sys.stderr) if sys.stderr else None) or _WIDTH + 10) - len(number) - 9
    shown = excerpt(span, max(room, 40), finding)
    margins = (f"      {number} | ", f"      {'':{len(number)}} | ")
    return [f"  --> {display(span.file)}:{number}", *map("".join, zip(margins, shown, strict=False))]


def shortened(text: str, limit: int = 2 * _WIDTH) -> str:
    """Returns text in which control characters are escaped, cut to `limit` characters."""
    return clean(text, limit)


def findings_of(error: ForgatherError) -> list[Diagnostic]:
    """Returns an error as a finding, followed by the further findings that are attached to the error."""
    first = _placed(error)
    others = [other for other in error.others if (other.code, other.message, other.span) != _key(first)]
    return [first, *others]


def _placed(error: ForgatherError) -> Diagnostic:
    """Returns an error as a finding. An error that a constructor raised gets the place of the call in the config."""
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, BuildNote)]
    found = error.diagnostic
    if not notes:
        return found
    return replace(found, span=found.span or notes[0].span, path=found.path or notes[0].path)


def _key(finding: Diagnostic) -> tuple[object, ...]:
    return finding.code, finding.message, finding.span


def print_error(error: ForgatherError, project_dir: str | None = None, see_all: str | None = None) -> None:
    """Prints a ForgatherError on the standard error stream.

    Args:
        error: the error.
        project_dir: the folder to which file names are relative, or None outside a project.
        see_all: the command that lists all errors, which is printed if not all fit, or None if there is no such
            command.
    """
    display = Display(project_dir)
    _print_lines(report(findings_of(error), display, see_all), _reported(display))


def print_crash(error: BaseException, project_dir: str | None = None) -> None:
    """Prints an exception of a constructor or of a run, with its place in the config and a shortened traceback.

    Args:
        error: the exception.
        project_dir: the folder to which file names are relative, or None outside a project.
    """
    # A late import: `traceback` alone takes longer than `fgcli --help` may.
    from forgather.cli.traceback_trim import crash_lines

    display = Display(project_dir)
    _print_lines(crash_lines(error, display, place=_place), _reported(display))


def print_findings(findings: Iterable[Diagnostic], project_dir: str | None = None, see_all: str | None = None) -> bool:
    """Prints the errors, warnings and notes among findings on the standard error stream, but not the lints.

    Args:
        findings: the findings, in any order.
        project_dir: the folder to which file names are relative, or None outside a project.
        see_all: the command that lists all findings, or None if there is no such command.

    Returns:
        True if one of the findings is an error.
    """
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
    """Returns a count with its noun in the singular or plural.

    Example:
        >>> plural(1, "checkpoint"), plural(2, "checkpoint"), plural(3, "copy", "copies")
        ('1 checkpoint', '2 checkpoints', '3 copies')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def print_note(text: str) -> None:
    """Prints one line on the standard error stream, so that it does not mix with output for other programs."""
    _print_lines([text])


def write_text(text: str, file: str | None = None, *, look: Look | None = None, is_hidden: bool = False) -> None:
    """Writes text to a file or to the standard output.

    Args:
        text: the text, to which a newline is added if the last one is missing.
        file: the name of the file, or None for the standard output.
        look: the colors and line breaks on a terminal, or None for plain text.
        is_hidden: whether the secrets in the text are hidden already.

    Raises:
        ProjectError: FG418 if the file or the standard output cannot be written.
    """
    text = (str if is_hidden else hide)(text if text.endswith("\n") else f"{text}\n")
    if file is None:
        # Python sets a stream to None if the caller has closed it.
        if sys.stdout is None:
            raise ProjectError("the standard output is closed", code="FG418", hint="write to a file with -o FILE")
        # Control characters of a config must not reach the terminal; a file or another program gets them unchanged.
        shown = visible(text) if _for_people() else text
        if look is not None:
            shown = "\n".join(shown_on(sys.stdout, line, look) for line in shown.split("\n"))
        _send(shown)
        flush_output()
        return
    try:
        write_whole(file, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ProjectError(
            f"{file!r} cannot be written: {error.strerror or error}",
            code="FG418",
            hint="name a file in a folder that exists and that you can write to",
        ) from error
    # A pipe or /dev/stdout is not a result that the user has to find.
    if os.path.isfile(file):
        print_note(f"wrote {shortened(file)}")


def _send(text: str) -> None:
    try:
        sys.stdout.write(_encodable(text, sys.stdout))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _no_output(error) from None


class Line(NamedTuple):
    """A line of output with individual colors and indentation.

    Args:
        text: the plain text of the line.
        paint: a function that adds colors to the line, or None for no colors.
        hang: the number of columns before the continuation lines, if the line is wrapped.
    """

    text: str
    paint: Callable[[str], str] | None = None
    hang: int = 4


def write_lines(lines: Iterable[Line], file: str | None = None, *, files: Mapping[str, str] | None = None) -> None:
    """Writes lines to a file or to the standard output; on a terminal, each line has its colors and indentation.

    Args:
        lines: the lines.
        file: the name of the file, or None for the standard output.
        files: the absolute paths of files by short name. On a terminal, short names in the lines become links.

    Raises:
        ProjectError: FG418 if the file or the standard output cannot be written.
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
    """Writes the lines of findings to the standard output.

    Args:
        lines: the lines.
        files: the absolute paths of files by short name. On a terminal, short names in the lines become links.
    """
    write_text("\n".join(lines), look=Look(paint_finding, hang_of_finding, files or {}))


def columns() -> int | None:
    """Returns the width of the terminal in columns.

    The result is None if the standard output is not a terminal, or if the terminal is too narrow for line breaks.
    """
    return width_of(sys.stdout) if sys.stdout is not None else None


def _for_people() -> bool:
    return sys.stdout.isatty() or wants_color(sys.stdout)


def flush_output() -> None:
    """Flushes the standard output.

    Raises:
        ProjectError: FG418 if the standard output cannot be written; later output is dropped.
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
    """Replaces closed standard streams by the null device, so that user code can print without an error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends


@contextmanager
def outlasting_readers() -> Iterator[None]:
    """Context manager in which a failed write to the standard output ends only the output, not the run.

    A write fails if the pipe is closed (`fgcli train | head`) or the disk is full.
    """
    before = sys.stdout
    ours = cast(TextIO, _Outlasting(before))
    sys.stdout = ours
    try:
        yield
    finally:
        if sys.stdout is ours:
            sys.stdout = before


class _Outlasting:
    """A wrapper of a text stream that drops all output after the first failed write."""

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
        why = "the reader of the output is gone" if left else f"the output cannot be written: {error.strerror or error}"
        print_note(f"{why}; the run continues, and its files contain the rest")


def flush_reports() -> None:
    """Flushes the standard error stream. If that fails, the stream is silenced; only the exit status reports errors."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def silence_output() -> None:
    """Redirects the standard output to the null device, so that flushing buffered output at the exit cannot fail."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _no_output(error: OSError) -> ProjectError:
    silence_output()
    message = f"the standard output cannot be written: {error.strerror or error}"
    return ProjectError(message, code="FG418", hint="make room where it goes, or write to a file with -o FILE")


def write_json(facts: Any, file: str | None = None) -> None:
    """Writes data as JSON to a file or to the standard output.

    Args:
        facts: the data. A value of a type that JSON does not have is written as text.
        file: the name of the file, or None for the standard output.
    """
    write_text(json.dumps(facts, indent=2, ensure_ascii=False, default=str), file)


def _print_lines(lines: Iterable[str], look: Look | None = None) -> None:
    flush_output()
    if sys.stderr is None:
        return
    # If the report cannot be written, the command must not fail with another error.
    with suppress(OSError):
        for line in map(visible, map(hide, lines)):
            shown = line if look is None else shown_on(sys.stderr, line, look)
            sys.stderr.write(_encodable(shown, sys.stderr) + "\n")
        sys.stderr.flush()


def _encodable(text: str, stream: IO[str]) -> str:
    # A character that the terminal's encoding does not have must not end a command.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
