"""Checks by name the code that a config would run: what no config may call, and what the user has to trust first.

The input is a graph and its project; the output is findings and `Needs`. Nothing is imported. A name says less than the
object that it refers to, so the object is checked again during construction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from forgather.config.builtin_names import SHORT
from forgather.config.callables import Standing, commands_of, judge_name
from forgather.config.graph import Call
from forgather.config.graph import Scalar as ScalarNode
from forgather.config.graph import Sequence as SequenceNode
from forgather.config.path import Key, format_path
from forgather.config.traverse import all_nodes, roots, walk
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.cross_project import projects_named
from forgather.project.checks.subject import Subject
from forgather.project.project import Project
from forgather.project.trust import current_trust
from forgather.project.untrusted import Needs, Places, denied_error, name_to_trust, trust_hint, untrusted_message


def check_trusted_calls(subject: Subject) -> Iterator[Diagnostic]:
    """Yields an error for each call that no config may make, and a note if the user has to trust code first."""
    project = subject.project
    places = Places(project.meta.project_dir, project.meta.system_path)
    for path, node in all_nodes(project.graph):
        if isinstance(node, Call):
            module, symbol = _module_and_symbol(node.constructor)
            own = _own_folders(node, places) is not None
            # A module of the project may have the same name as a denied one.
            verdict = judge_name("own" if own else module, symbol)
            if verdict.standing is Standing.DENIED:
                found = denied_error(verdict).diagnostic
                yield Diagnostic(
                    code=found.code,
                    message=f"no config may call {node.constructor!r}: {verdict.why}",
                    span=node.span,
                    path=format_path(path),
                    hint=found.hint,
                )
    needs = needs_of(project)
    missing = needs.beyond(current_trust()) if needs else needs
    if missing:
        yield Diagnostic(
            code="FG440", message=untrusted_message(missing), severity=Severity.NOTE, hint=trust_hint(missing)
        )


def needs_of(project: Project, targets: Sequence[str] | None = None) -> Needs:
    """Returns the folders and packages that the user has to trust before the targets can be built.

    Args:
        project: the config.
        targets: the names of the targets; None for all targets.
    """
    return _needs(project, targets, set())


def _needs(project: Project, targets: Sequence[str] | None, seen: set[tuple[str, str]]) -> Needs:
    seen.add((project.meta.project_dir, project.config_name))
    places = Places(project.meta.project_dir, project.meta.system_path)
    needs = Needs(folders=tuple(places.owner(folder) for folder in project.meta.system_path if os.path.isdir(folder)))
    tops = [top for top in roots(project.graph) if targets is None or top[0] in [(Key(name),) for name in targets]]
    # Only distinct needs are joined: joining those of every call would take quadratic time.
    kinds = {_needs_of_call(node, places): None for _, node in walk(tops) if isinstance(node, Call)}
    folders = tuple(folder for kind in kinds for folder in kind.folders)
    packages = tuple(package for kind in kinds for package in kind.packages)
    needs = needs.plus(Needs(folders=folders, packages=packages))
    for other in projects_named(project.graph, project):
        # Two projects may use each other.
        if (other.meta.project_dir, other.config_name) not in seen:
            needs = needs.plus(_needs(other, None, seen))
    return needs


def _needs_of_call(node: Call, places: Places) -> Needs:
    own = _own_folders(node, places)
    if own is not None:
        return Needs(folders=tuple(own))
    module, symbol = _module_and_symbol(node.constructor)
    commands = commands_of(module, symbol)
    given = [entry.value for entry in (*node.kwargs, *node.latent_args) if entry.key in commands]
    if any(not (isinstance(value, ScalarNode) and value.value is None) for value in given):
        # A command is code of the project that names it.
        return Needs(folders=(places.owner(places.project_dir),))
    unlisted = judge_name(module, symbol).standing is Standing.UNLISTED and places.exists(name_to_trust(module))
    return Needs(packages=(name_to_trust(module),)) if unlisted else Needs()


def _own_folders(node: Call, places: Places) -> list[str] | None:
    """Returns the folders to trust for a call of code that is not installed; None if the code is installed."""
    module, _ = _module_and_symbol(node.constructor)
    is_file = module.endswith(".py") or "/" in module
    if not is_file and not module.startswith("."):
        home = places.home(module.partition(".")[0])
        return None if home is None else [home]
    folders = [os.path.dirname(module)] if is_file else []
    folders += _plain_folders(node.submodule_searchpath)
    absolute = (os.path.join(places.project_dir, os.path.expanduser(folder)) for folder in folders)
    return list(dict.fromkeys(places.owner(folder) for folder in absolute))


def _plain_folders(node: object) -> list[str]:
    items = node.items if isinstance(node, SequenceNode) else (node,)
    return [item.value for item in items if isinstance(item, ScalarNode) and isinstance(item.value, str)]


def _module_and_symbol(constructor: str) -> tuple[str, str]:
    module, colon, symbol = constructor.rpartition(":")
    if colon:
        return module, symbol
    return ("forgather.config.builtin_names" if constructor in SHORT else "builtins"), constructor
