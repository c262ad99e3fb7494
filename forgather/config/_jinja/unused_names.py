"""Findings about names that are set in templates or given from outside, and that nothing reads.

The inputs are the templates of a load and their tables of names; the output is findings. Invariants: there is no
finding about a name that anything in the load may read, and none about the `set`s of a template from outside the
project.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property

from forgather.aliases import alias_of
from forgather.bounded import TooManyEntriesError, walk_folders
from forgather.config._jinja.environment import LoadedTemplate, RunEnvironment
from forgather.config._jinja.loader import read_text
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.spelling import close_matches

_NEAR = 0.75
_MAX_SEARCHED = 500


def names_read(environment: RunEnvironment) -> frozenset[str]:
    """Returns the names that any template of the load reads."""
    return frozenset().union(*[template.namespace["fg_reads"] for template in environment.templates])


def unread_variables(environment: RunEnvironment, given: Collection[str]) -> Iterator[Diagnostic]:
    """Yields a warning for each variable from an option or a Python caller that no template reads.

    Args:
        environment: the environment in which the templates ran.
        given: the names of the variables.
    """
    for name in given:
        if _is_read(name, environment):
            continue
        alias = alias_of("setting", name)
        close = close_matches(name, sorted(_free_names(environment)), n=1, cutoff=0.6)
        if alias is not None and alias.verdict == "same":
            # The table knows the right name, so a similar spelling would be a worse guess.
            close = [alias.name] if alias.name in _free_names(environment) else []
        yield Diagnostic(
            code="FG136",
            message=f"the variable {name!r} is given, but no template of this config reads it",
            severity=Severity.WARNING,
            hint=f"did you mean {close[0]!r}?" if close else "to change a value of the config, use --set path=value",
            context=(environment.library.story(0),),
        )


def unread_sets(environment: RunEnvironment) -> Iterator[Diagnostic]:
    """Yields a finding for each `set` in a template of the project whose value nothing reads."""
    project = environment.globals.get("project_dir")
    files = _ProjectFiles(environment)
    for template in environment.templates:
        tables = template.namespace
        if not (tables["fg_sets"] or tables["fg_set_fields"]) or not is_own(template, project):
            continue
        for name, line, kind, scope, is_read in tables["fg_sets"]:
            # The `set` is inside a loop, block or macro, at whose end Jinja discards the name.
            if kind:
                place = f"{kind} '{scope}'" if scope else kind
                missed = is_read or _is_read(name, environment)
                yield _forgotten(environment, template, name, line, place, missed=missed)
            elif not _is_read(name, environment) and not _is_imported(template, name, environment):
                near = _near(name, _free_names(environment), tables["fg_written"])
                # A template that several configs share may set a name for another of them: a file that contains the
                # name may read it.
                if near or not files.hold(name, template):
                    yield _unread(environment, template, name, line, near)
        for base, field, line in tables["fg_set_fields"]:
            if is_field_read(base, field, environment):
                continue
            fields = _fields_of(base, environment)
            alias = alias_of("variable", field)
            near = alias.name if alias and alias.name in fields else _near(field, fields, tables["fg_written"])
            told = alias_of("variable", alias.name if alias and alias.verdict == "same" else field)
            elsewhere = told.why if told and told.verdict == "elsewhere" else ""
            if near or elsewhere or not files.hold(field, template):
                name = f"{base}.{field}"
                readers = files.readers(name)
                if readers and not near:
                    yield _of_others(environment, template, name, line, readers)
                else:
                    yield _unread(environment, template, name, line, f"{base}.{near}" if near else None, elsewhere)


def _unread(
    environment: RunEnvironment,
    template: LoadedTemplate,
    name: str,
    line: int,
    near: str | None,
    elsewhere: str = "",
) -> Diagnostic:
    parent = _extended_after(line, template, environment)
    hint = f"did you mean {near!r}?" if near else elsewhere or "remove the line, or read the name"
    if parent and not near and not elsewhere:
        hint = f"a variable set before `extends` is for {parent!r}, which does not read this one: "
        hint += "remove the line, or extend a template that does"
    severity = Severity.WARNING if near or parent or elsewhere else Severity.LINT
    message = f"{name!r} is set, but no template of this config reads it"
    return finding_in(template, environment, line, "FG134", message, severity, hint)


def _of_others(
    environment: RunEnvironment, template: LoadedTemplate, name: str, line: int, readers: list[str]
) -> Diagnostic:
    """Returns a finding about a setting of templates of the library that the config does not use.

    A file or folder that the config itself names is an error: the run would train on other data. A template that
    several configs share may set it for one of the others, and another setting may be a leftover.
    """
    message = f"{name!r} is set, but no template of this config reads it"
    hint = f"it is a setting of {', '.join(map(repr, readers))}: remove the line, or include that template"
    is_of_data = template.use == 0 and name.endswith(("_file", "_dir"))
    severity = Severity.ERROR if is_of_data else Severity.WARNING
    return finding_in(template, environment, line, "FG134", message, severity, hint)


def finding_in(
    template: LoadedTemplate,
    environment: RunEnvironment,
    line: int,
    code: str,
    message: str,
    severity: Severity,
    hint: str | None,
) -> Diagnostic:
    """Returns a finding at a line of a template, with the statements that loaded the template."""
    span, story = template.definition.span(line), environment.library.story(template.use)
    return Diagnostic(code=code, message=message, severity=severity, span=span, hint=hint, context=(story,))


def _extended_after(line: int, template: LoadedTemplate, environment: RunEnvironment) -> str | None:
    """Returns the name of the template that the config extends below `line`; None if there is no such `extends`."""
    for use in environment.library.uses:
        if use.why == "extends" and use.parent == template.use == 0 and use.by is not None and use.by.line > line:
            return use.name
    return None


def _forgotten(
    environment: RunEnvironment, template: LoadedTemplate, name: str, line: int, place: str, *, missed: bool
) -> Diagnostic:
    message = f"{name!r} is set inside the {place}, which does not read it and discards it at its end"
    hint = f"set it outside, or keep it in a namespace: `-- set ns.{name} = ...`"
    severity = Severity.WARNING if missed else Severity.LINT
    return finding_in(template, environment, line, "FG134", message, severity, hint)


def is_own(template: LoadedTemplate, project: object) -> bool:
    """Returns whether a template is in a file of the project; always true if there is no project."""
    return not isinstance(project, str) or template.definition.file.startswith(os.path.join(project, ""))


def _is_read(name: str, environment: RunEnvironment) -> bool:
    return any(name in template.namespace["fg_reads"] for template in environment.templates)


def _is_imported(template: LoadedTemplate, name: str, environment: RunEnvironment) -> bool:
    """Returns whether a template was imported and another template may read the name as an attribute of the import."""
    if environment.library.uses[template.use].why != "import":
        return False
    return any(name == field for other in environment.templates for _, field in other.namespace["fg_fields"])


def is_field_read(base: str, field: str, environment: RunEnvironment) -> bool:
    """Returns whether any template of the load may read an attribute of a name."""
    return any(
        base in template.namespace["fg_whole"] or any(field == known for _, known in template.namespace["fg_fields"])
        for template in environment.templates
    )


def _free_names(environment: RunEnvironment) -> set[str]:
    """Returns the names that templates read and that are not global, which a `set` or a variable must define."""
    return set(names_read(environment) - environment.globals.keys())


def _fields_of(base: str, environment: RunEnvironment) -> set[str]:
    return {
        field for template in environment.templates for name, field in template.namespace["fg_fields"] if name == base
    }


def _near(name: str, known: set[str], own: Collection[str]) -> str | None:
    """Returns the closest known name that the template does not set itself; None if no name is close."""
    return next(iter(close_matches(name, sorted(known.difference(own)), n=1, cutoff=_NEAR)), None)


class _ProjectFiles:
    """The words in the template files of a project; the files are read once, when a word is first searched."""

    def __init__(self, environment: RunEnvironment) -> None:
        self._library = environment.library
        project = environment.globals.get("project_dir")
        self._project = os.path.join(project, "") if isinstance(project, str) else None

    def hold(self, name: str, template: LoadedTemplate) -> bool:
        """Returns whether another file of the project contains a name that a template other than the config sets.

        A template that several configs share may set a name for one of the others.
        """
        file = template.definition.file
        return file != self._library.uses[0].file and any(
            name in words for path, words in self._words.items() if path != file
        )

    def readers(self, name: str) -> list[str]:
        """Returns the templates outside the project that print a field of a namespace, such as `ns.train_file`."""
        known = re.compile(rf"{{[{{%][^\n]*\b{re.escape(name)}\b|^-- (?!set )[^\n]*\b{re.escape(name)}\b", re.MULTILINE)
        found = []
        for root in self._library.roots:
            if self._project is None or not os.path.join(root, "").startswith(self._project):
                for path in sorted(_files(root)):
                    with suppress(ForgatherError):
                        if known.search(read_text(path)):
                            found.append(os.path.relpath(path, root))
        return found

    @cached_property
    def _words(self) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for root in self._library.roots:
            if self._project is None or os.path.join(root, "").startswith(self._project):
                for path in _files(root):
                    with suppress(ForgatherError):
                        found[path] = frozenset(re.findall(r"\w+", read_text(path)))
        return found


def _files(root: str) -> Iterator[str]:
    count = 0
    # A folder of data may be too large to walk, and no finding stops a render.
    with suppress(TooManyEntriesError):
        for folder, folders, files in walk_folders(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            count += len(folders)
            for name in files:
                # A search path may contain a data folder, so the search is bounded; names of later files are not found.
                count += 1
                if count > _MAX_SEARCHED:
                    return
                if name.endswith((".yaml", ".yml")):
                    yield os.path.join(folder, name)
