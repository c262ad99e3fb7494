"""The notes of a template: what a config says in `meta.notes` about values that it was given.

The input is the target `meta`; the output is one finding for each note. A template that reads settings of another tool
explains there what each of them means today.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.config.graph import Scalar
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.subject import Subject
from forgather.project.literal import string_entries


def check_template_notes(subject: Subject) -> Iterator[Diagnostic]:
    """Yields the notes of `meta.notes`, a mapping from the names of settings to sentences."""
    meta = subject.graph.targets.get("meta")
    for notes in string_entries(meta.value) if meta is not None else ():
        if notes.key != "notes":
            continue
        for entry in string_entries(notes.value):
            if isinstance(entry.value, Scalar) and entry.value.value is not None:
                yield Diagnostic(
                    code="FG973",
                    message=f"{entry.key}: {entry.value.value}",
                    severity=Severity.NOTE,
                    span=entry.origin.span if entry.origin else entry.value.span,
                    path=f"meta.notes.{entry.key}",
                )
