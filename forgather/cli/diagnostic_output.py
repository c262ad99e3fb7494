"""All findings of a config together, short: grouped by file, one head line each.

Takes findings, gives lines for the terminal or facts for JSON; an error that ends a command, as JSON. Keeps true:
nothing is left out, files with errors come first, and a finding reads the same as in the report of a single error, cut
to what fits on three lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forgather.cli.output import NO_LINES, findings_of, in_brief, source_line, write_json
from forgather.errors import BuildNote, Diagnostic, ForgatherError
from forgather.project.path_display import Display

if TYPE_CHECKING:
    from forgather.config.lint.call_check import Unchecked

_SOURCE_WIDTH = 110


def grouped(findings: Iterable[Diagnostic], display: Display) -> list[str]:
    """Returns the lines that show findings, by file; the order of the findings decides which file comes first."""
    files: dict[str, list[Diagnostic]] = {}
    for finding in findings:
        files.setdefault(finding.span.file if finding.span else "", []).append(finding)
    lines: list[str] = []
    for file, found in files.items():
        lines += [file[1:-1] if file.startswith(NO_LINES) else display(file)] if file else []
        width = max(len(_line(finding)) for finding in found)
        for finding in found:
            margin = "  " if file.startswith(NO_LINES) else ""
            lines += [margin + line for line in _entry(finding, display, width if file else 0)]
        lines.append("")
    return lines


def _line(finding: Diagnostic) -> str:
    return str(finding.span.line) if finding.span and not finding.span.file.startswith(NO_LINES) else ""


def _entry(finding: Diagnostic, display: Display, width: int) -> list[str]:
    number = _line(finding)
    first, *more = in_brief(display.shorten(finding.message)).split("\n")
    margin = " " * (width + 4 if width else 2)
    head = f"{number:>{width + 2}}  " if width else ""
    lines = [f"{head}{finding.severity}[{finding.code}]: {first}", *(f"{margin}{line}" for line in more[:3])]
    text = source_line(finding.span) if finding.span else None
    if text is not None and text.strip():
        lines.append(f"{margin}| {in_brief(text.rstrip(), _SOURCE_WIDTH)}")
    if finding.path:
        lines.append(f"{margin}in {in_brief(finding.path, _SOURCE_WIDTH)}")
    # A value that a template prints was perhaps set somewhere else.
    lines += [f"{margin}{in_brief(display.shorten(part))}" for part in finding.context if part.startswith("set at ")]
    if finding.hint:
        lines.append(f"{margin}help: {in_brief(display.shorten(finding.hint))}".replace("\n", " "))
    return lines


def not_checked(unchecked: Iterable[Unchecked], display: Display) -> list[str]:
    """Returns the lines that say what was not checked, and why."""
    lines = []
    for one in unchecked:
        place = f"  ({display(one.span.file)}:{one.span.line})" if one.span else ""
        lines.append(f"  not checked: {one.path}, {one.constructor}: {display.shorten(one.reason)}{place}")
    return lines


def write_error(error: BaseException, project_dir: str | None = None) -> None:
    """Writes what ended a command as JSON: an error of ours with its further findings, or any other exception."""
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
    """Returns a finding as plain data; `config` is the config that it belongs to."""
    span = finding.span
    facts = {
        "code": finding.code,
        "severity": str(finding.severity),
        "message": display.shorten(finding.message),
        "file": display(span.file) if span else None,
        "line": span.line if span else None,
        "column": span.column or None if span else None,
        "path": finding.path,
        "hint": finding.hint and display.shorten(finding.hint),
    }
    return facts if config is None else {**facts, "config": config}


def unchecked_facts(one: Unchecked, display: Display, config: str) -> dict[str, Any]:
    """Returns what was not checked as plain data."""
    return {
        "path": one.path,
        "constructor": one.constructor,
        "reason": display.shorten(one.reason),
        "file": display(one.span.file) if one.span else None,
        "line": one.span.line if one.span else None,
        "config": config,
    }
