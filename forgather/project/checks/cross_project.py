"""Checks calls of `from_project`, by which a config uses targets of other projects.

The input is a graph and its project; the output is findings about projects, configs and targets that do not exist, and
the calls that could not be checked. The other config is rendered and loaded, but nothing in it is constructed. A call
can only be checked if its folder, config and targets are plain data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from forgather.config.graph import Call, CallKind, Entry, Graph, Node, list_of_targets
from forgather.config.lint.call_check import Unchecked
from forgather.config.path import GraphPath, Key, format_path
from forgather.config.traverse import all_nodes
from forgather.errors import Diagnostic, ForgatherError, ProjectError
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.source import Span

CONSTRUCTORS = frozenset(
    {"forgather:from_project", "forgather.project:from_project", "forgather.project.project:from_project"}
)
_PARAMETERS = ("project_dir", "config_template", "targets", "pp_kwargs")


def check_other_projects(graph: Graph, project: Project) -> tuple[list[Diagnostic], list[Unchecked]]:
    """Returns the findings about calls of `from_project`, and the calls with arguments that are not plain data.

    Args:
        graph: the graph that contains the calls.
        project: the project of the graph; folders in the calls are relative to its folder.
    """
    findings: list[Diagnostic] = []
    unchecked: list[Unchecked] = []
    loaded: dict[tuple[Any, ...], Project] = {}
    for path, node in all_nodes(graph):
        if not isinstance(node, Call) or node.constructor not in CONSTRUCTORS or node.kind is CallKind.META:
            continue
        try:
            findings += _check_call(node, path, project, loaded)
        except _NotWritten as reason:
            unchecked.append(
                Unchecked(path=format_path(path), constructor=node.constructor, reason=str(reason), span=node.span)
            )
    return findings, unchecked


def projects_named(graph: Graph, project: Project) -> list[Project]:
    """Returns the configs of other projects that a graph uses, as far as the calls contain plain data.

    Args:
        graph: the graph that contains the calls.
        project: the project of the graph; folders in the calls are relative to its folder.
    """
    loaded: dict[tuple[Any, ...], Project] = {}
    for path, node in all_nodes(graph):
        if isinstance(node, Call) and node.constructor in CONSTRUCTORS and node.kind is not CallKind.META:
            with suppress(ForgatherError, _NotWritten):
                _check_call(node, path, project, loaded)
    return list(loaded.values())


class _NotWritten(Exception):  # it only ends a look-up
    """The value of an argument is known only after construction."""


def _check_call(
    node: Call, path: GraphPath, project: Project, loaded: dict[tuple[Any, ...], Project]
) -> list[Diagnostic]:
    written: dict[str, Node | Entry] = dict(zip(_PARAMETERS, node.args, strict=False))
    written |= {str(entry.key): entry for entry in node.kwargs}
    plain = {name: _plain_argument(written[name], name) for name in _PARAMETERS if name in written}
    folder, config, targets = (plain.get(name) for name in _PARAMETERS[:3])
    names = [targets] if isinstance(targets, str) else targets
    variables = plain.get("pp_kwargs") or {}
    if not isinstance(folder, str) or not isinstance(names, list) or not isinstance(variables, Mapping):
        return []
    try:
        there = _loaded(project, folder, config, variables, loaded)
    except ForgatherError as error:
        at = "project_dir" if error.code in ("FG400", "FG401") else "config_template"
        shown = "its default config" if config is None else f"config {config!r}"
        message = f"{shown} of project {folder!r} cannot be used: {error.message}"
        return [_finding(message, error.hint, path, at, _span(written.get(at), node))]
    missing = [name for name in names if isinstance(name, str) and name not in there.targets]
    return [
        _finding(
            f"config {there.config_name!r} of project {folder!r} has no target {name!r}",
            list_of_targets(list(there.targets), name),
            path,
            "targets",
            _span(written.get("targets"), node),
        )
        for name in missing
    ]


def _plain_argument(written: Node | Entry, name: str) -> Any:
    try:
        return plain_value(written.value if isinstance(written, Entry) else written, name)
    except ProjectError:
        raise _NotWritten(f"its {name} is known only when it is built") from None


def _loaded(
    project: Project, folder: str, config: Any, variables: Mapping[str, Any], loaded: dict[tuple[Any, ...], Project]
) -> Project:
    place = os.path.normpath(os.path.join(project.meta.project_dir, folder))
    # The variables may not be hashable.
    key = (place, config, repr(variables))
    if key not in loaded:
        there = Project(config if isinstance(config, str) else None, place, **variables)
        # Loading here makes errors of the other config part of this look-up.
        _ = there.graph
        loaded[key] = there
    return loaded[key]


def _finding(message: str, hint: str | None, path: GraphPath, argument: str, span: Span | None) -> Diagnostic:
    return Diagnostic(code="FG245", message=message, span=span, path=format_path((*path, Key(argument))), hint=hint)


def _span(written: Node | Entry | None, node: Call) -> Span | None:
    return (written.span if written else None) or node.span
