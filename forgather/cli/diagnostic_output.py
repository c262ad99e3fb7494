"""Output of all findings of a check, grouped by file, and of errors as JSON.

The input is findings; the output is lines for the terminal, or plain data. No finding is left out. The files come in
the order of their first finding. Each finding is worded as in the report of a single error, with at most four lines of
its message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forgather.cli.output import NO_LINES, columns, findings_of, shortened, write_json
from forgather.cli.source_excerpt import excerpt
from forgather.errors import BuildNote, Diagnostic, ForgatherError
from forgather.project.path_display import Display
from forgather.source import Span

if TYPE_CHECKING:
    from forgather.config.lint.call_check import Unchecked

_SOURCE_WIDTH = 110


def grouped(findings: Iterable[Diagnostic], display: Display) -> list[str]:
    """Returns the findings as lines of text, grouped by file.

    Args:
        findings: the findings. The files come in the order of their first finding.
        display: the object that shortens the names of files.
    """
    files: dict[str, list[Diagnostic]] = {}
    for finding in findings:
        files.setdefault(finding.span.file if finding.span else "", []).append(finding)
    lines: list[str] = []
    for found in files.values():
        for finding in found:
            lines += _entry(finding, display)
        lines.append("")
    return lines


def _entry(finding: Diagnostic, display: Display) -> list[str]:
    first, *more = shortened(display.shorten(finding.message)).split("\n")
    place = f"{_place(finding.span, display)}: " if finding.span else ""
    lines = [f"{place}{finding.severity}[{finding.code}]: {first}", *(f"    {line}" for line in more[:3])]
    lines += [
        f"    | {line}" for line in excerpt(finding.span, min(_SOURCE_WIDTH, columns() or _SOURCE_WIDTH), finding)
    ]
    if finding.path:
        lines.append(f"    in {shortened(finding.path, _SOURCE_WIDTH)}")
    # A value that a template prints may have been set in another file, which is where the user has to change it.
    lines += [f"    {shortened(display.shorten(part))}" for part in finding.context if part.startswith("set at ")]
    if finding.hint:
        lines.append(f"    help: {shortened(display.shorten(finding.hint))}".replace("\n", " "))
    return lines


def _place(span: Span, display: Display) -> str:
    return span.file[1:-1] if span.file.startswith(NO_LINES) else f"{display(span.file)}:{span.line}"


def not_checked(unchecked: Iterable[Unchecked], display: Display) -> list[str]:
    """Returns a line for each constructor call that could not be checked, with the reason.

    Args:
        unchecked: the calls that could not be checked.
        display: the object that shortens the names of files.
    """
    lines = []
    for one in unchecked:
        place = f"  ({display(one.span.file)}:{one.span.line})" if one.span else ""
        lines.append(f"  not checked: {one.path}, {one.constructor}: {display.shorten(one.reason)}{place}")
    return lines


def write_error(error: BaseException, project_dir: str | None = None) -> None:
    """Writes the exception that ended a command to the standard output as JSON.

    Args:
        error: the exception. The further findings of a ForgatherError are included.
        project_dir: the folder to which file names are relative, or None outside a project.
    """
    display = Display(project_dir)
    if isinstance(error, ForgatherError):
        first, *others = [finding_facts(finding, display) for finding in findings_of(error)]
        write_json({"error": {**first, "others": others}})
        return
    note = next((note for note in getattr(error, "__notes__", ()) if isinstance(note, BuildNote)), None)
    found = Diagnostic(
        code="",
        message=f"{type(error).__name__}: {error}",
        span=note.span if note else None,
        path=note.path if note else None,
    )
    write_json({"error": {**finding_facts(found, display), "code": None, "others": []}})


def finding_facts(finding: Diagnostic, display: Display, config: str | None = None) -> dict[str, Any]:
    """Returns a finding as plain data.

    Args:
        finding: the finding.
        display: the object that shortens the names of files.
        config: the name of the config to which the finding belongs, or None to leave the entry out.
    """
    span = finding.span
    facts = {
        "code": finding.code,
        "severity": str(finding.severity),
        "message": display.shorten(finding.message),
        "file": display(span.file) if span else None,
        "line": span.line if span else None,
        # Column 0 means that only the line is known.
        "column": span.column or None if span else None,
        "path": finding.path,
        "hint": finding.hint and display.shorten(finding.hint),
    }
    return facts if config is None else {**facts, "config": config}


def unchecked_facts(one: Unchecked, display: Display, config: str) -> dict[str, Any]:
    """Returns plain data that describe a constructor call that could not be checked, and the reason.

    Args:
        one: the call that could not be checked.
        display: the object that shortens the names of files.
        config: the name of the config to which the call belongs.
    """
    return {
        "path": one.path,
        "constructor": one.constructor,
        "reason": display.shorten(one.reason),
        "file": display(one.span.file) if one.span else None,
        "line": one.span.line if one.span else None,
        "config": config,
    }
