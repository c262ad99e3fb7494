"""Surroundings that are the same on every machine and every day, for what is to be compared later.

Takes a project's facts, gives a config that sees stand-ins for folders, host, clock, versions and environment
variables, and a graph in which paths read `{project}`. Keeps true: nothing of the machine is in the graph; a stand-in
is an absolute path, so that templates do with it what they do with the real one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime

from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import Graph, Node, Scalar
from forgather.config.traverse import rebuild
from forgather.project.locations import cache_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.project import Project
from forgather.project.versions import TEMPLATE_KEYS

_PROJECT, _WORKSPACE, _CWD, _HOME = "/__project__", "/__workspace__", "/__cwd__", "/__home__"
_NOW = datetime(2000, 1, 1)
# Above every real one: a template that asks "new enough?" gets a yes.
_VERSION = "999.0.0"
_FOLDERS = ("user_data_dir", "user_cache_dir", "user_config_dir", "site_data_dir", "site_config_dir")
_NOT_GIVEN = object()


def still_project(meta: ProjectMeta, config_name: str) -> Project:
    """Returns a config whose templates see nothing of this machine and this day."""
    environment = ConfigEnvironment(
        searchpath=meta.searchpath, variables=_variables(meta), now=_NOW, cache_dir=cache_dir("templates")
    )
    return Project.placed(meta, config_name, environment=environment)


def still_graph(project: Project) -> Graph:
    """Returns the graph of a still project, with the stand-ins for folders as `{project}` and the like."""
    meta, graph = project.meta, project.graph
    names = {_project_dir(meta): "{project}", _WORKSPACE: "{workspace}", _CWD: "{cwd}", _HOME: "{home}"}
    made: dict[int, Node] = {}

    def change(node: Node) -> Node:
        if id(node) not in made:
            made[id(node)] = _named(node, names) if isinstance(node, Scalar) else rebuild(node, change)
        return made[id(node)]

    entries = [(entry, change(entry.value)) for entry in (*graph.targets.values(), *graph.definitions)]
    changed = [entry if node is entry.value else replace(entry, value=node) for entry, node in entries]
    return replace(
        graph,
        targets=dict(zip(graph.targets, changed, strict=False)),
        definitions=tuple(changed[len(graph.targets) :]),
        anchors={id(made[key]): name for key, name in graph.anchors.items() if key in made},
    )


def _named(node: Scalar, names: dict[str, str]) -> Scalar:
    if not isinstance(node.value, str) or "/__" not in node.value:
        return node
    text = node.value
    for folder, name in names.items():
        text = text.replace(folder, name)
    return node if text == node.value else replace(node, value=text)


def _project_dir(meta: ProjectMeta) -> str:
    if meta.workspace_root is None:
        return _PROJECT
    inside = os.path.relpath(meta.project_dir, meta.workspace_root)
    return _WORKSPACE if inside == os.curdir else f"{_WORKSPACE}/{inside}".replace(os.sep, "/")


def _variables(meta: ProjectMeta) -> dict[str, object]:
    host = {"system": "Linux", "node": "hostname", "release": "0", "version": "0", "machine": "machine"}
    return {
        "project_dir": _project_dir(meta),
        "workspace_root": _WORKSPACE if meta.workspace_root else _project_dir(meta),
        "hostname": "hostname",
        "uname": host,
        "versions": dict.fromkeys(TEMPLATE_KEYS, _VERSION),
        "env": _env,
        "getcwd": lambda: _CWD,
        "abspath": _absolute,
        "relpath": _relative,
        "user_home_dir": lambda: _HOME,
        "forgather_config_dir": lambda: f"{_HOME}/forgather_config_dir",
        **{name: _folder(name) for name in _FOLDERS},
    }


def _env(name: str, default: object = _NOT_GIVEN) -> object:
    return f"__env_{name}__" if default is _NOT_GIVEN else default


def _absolute(path: str) -> str:
    return os.path.normpath(os.path.join(_CWD, path))


def _relative(path: str, start: str = _CWD) -> str:
    return os.path.relpath(_absolute(path), _absolute(start))


def _folder(name: str) -> object:
    def folder(appname: str | None = None, appauthor: str | None = None) -> str:
        return os.path.join(_HOME, name, appname or "")

    return folder
