"""Checks the project's Python files for imports that certainly fail.

The input is the calls of a graph and a reader of signatures; the output is findings at lines of Python files. Nothing
is imported. An import inside a condition, a `try` or a function is not checked, and neither is a file that changes
where Python searches modules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from forgather.bounded import MAX_CODE_BYTES, read_text
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.subject import Subject
from forgather.source import Span

# Only unindented imports, which nothing guards. Relative imports are checked when the constructor is read.
_IMPORT = re.compile(r"^(?:from[ \t]+([A-Za-z_][\w.]*)[ \t]+import\b|import[ \t]+([A-Za-z_][\w.]*))", re.MULTILINE)
_CHANGES_THE_SEARCH = re.compile(r"sys\.(?:path|modules|meta_path)|importlib|__import__|__path__|site\.")


def check_imports(subject: Subject) -> Iterator[Diagnostic]:
    """Yields an error for each unindented import of a module that certainly does not exist."""
    project_dir, reader = subject.project.meta.project_dir, subject.reader
    files = dict.fromkeys(_file(called.node.constructor, project_dir) for called in subject.calls.values())
    for file in files:
        text = _read_source(file) if file else None
        if file is None or text is None or _CHANGES_THE_SEARCH.search(text):
            continue
        for found in _IMPORT.finditer(text):
            name = found[1] or found[2]
            line = text.count("\n", 0, found.start()) + 1
            error = reader.missing_module(name)
            if error is not None and _is_statement(text, line, name):
                yield Diagnostic(
                    code=error.code,
                    message=f"{error.message}, which {os.path.basename(file)} imports",
                    severity=Severity.ERROR,
                    span=Span(file, line),
                    hint=_relative_import_hint(file, name) or error.hint,
                )


def _file(constructor: str, project_dir: str) -> str | None:
    module = constructor.partition(":")[0]
    return os.path.normpath(os.path.join(project_dir, module)) if module.endswith(".py") else None


def _read_source(file: str) -> str | None:
    try:
        return read_text(file, MAX_CODE_BYTES)
    except (OSError, UnicodeDecodeError):
        return None


def _is_statement(text: str, line: int, name: str) -> bool:
    """Returns whether a line is an import statement at module level, and not part of a string."""
    import ast  # takes milliseconds to import, and is needed only if a module is missing

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    for statement in tree.body:
        if statement.lineno == line:
            if isinstance(statement, ast.Import):
                return any(alias.name == name for alias in statement.names)
            return isinstance(statement, ast.ImportFrom) and not statement.level and statement.module == name
    return False


def _relative_import_hint(file: str, name: str) -> str | None:
    """Returns the hint for a missing module if a file of this name is next to the importing file; None otherwise."""
    there = os.path.join(os.path.dirname(file), *name.split(".")) + ".py"
    return f"for the file next to it, write `from .{name} import ...`" if os.path.isfile(there) else None
