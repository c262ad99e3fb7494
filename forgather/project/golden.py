"""Goldens: files that contain the graph of a config, to be compared with the config later, on any machine.

The input is a project; the output is its configs, rendered with fixed replacements for folders, host, clock, versions
and environment variables, and their graphs, in which paths begin with names such as `{project}`. The replacement of a
folder is an absolute path, so that templates treat it like a real one. A golden contains no facts about the machine
that wrote it.
`compare_goldens` compares goldens with configs, and `update_golden` writes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from forgather.bounded import MAX_RECORD_BYTES, read_text
from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import Graph, Node, Scalar
from forgather.config.insight.change import Difference
from forgather.config.insight.diff import diff
from forgather.config.load import load
from forgather.config.rendered import RenderedText
from forgather.config.traverse import replace_nodes
from forgather.errors import ForgatherError, ProjectError
from forgather.project.configs import choose_config, config_files
from forgather.project.locations import cache_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.project import Project
from forgather.project.versions import TEMPLATE_KEYS
from forgather.redaction import HIDDEN, hide
from forgather.source import Origin, Site, SourceFile, SourceMap, Span

_PROJECT, _WORKSPACE, _CWD, _HOME = "/__project__", "/__workspace__", "/__cwd__", "/__home__"
_NOW = datetime(2000, 1, 1)
# A version above every real one, so that a template that needs a minimum version accepts it.
_VERSION = "999.0.0"
_FOLDERS = ("user_data_dir", "user_cache_dir", "user_config_dir", "site_data_dir", "site_config_dir")
# None is a valid default of `env`.
_NOT_GIVEN = object()


def machine_independent_project(meta: ProjectMeta, config_name: str) -> Project:
    """Returns a config whose templates see fixed replacements for all facts about the machine and the time.

    Args:
        meta: the project.
        config_name: the name of the config.
    """
    environment = ConfigEnvironment(
        searchpath=meta.searchpath, variables=_variables(meta), now=_NOW, cache_dir=cache_dir("templates")
    )
    return Project.in_environment(meta, config_name, environment=environment)


def machine_independent_graph(project: Project) -> Graph:
    """Returns the graph of a machine-independent config, with names such as `{project}` for its fixed folders."""
    meta = project.meta
    # The project comes first, because it may be inside the workspace.
    names = {_project_dir(meta): "{project}", _WORKSPACE: "{workspace}", _CWD: "{cwd}", _HOME: "{home}"}
    return replace_nodes(project.graph, lambda node: _with_names(node, names))


def _with_names(node: Node, names: dict[str, str]) -> Node:
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or "/__" not in node.value:
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


FOLDER = "goldens"
_HEAD = "# A golden: what a config describes. 'fgcli golden' compares, 'fgcli golden --update' writes this file.\n"
_NOT_OURS = "remove it, or move it to another folder; then 'fgcli golden --update' writes one"


class GoldenState(StrEnum):
    """The result of comparing a golden with its config."""

    SAME = "same"
    DIFFERS = "differs"
    MISSING = "no golden"
    LOST = "no config"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class GoldenCheck:
    """A config and its golden.

    Args:
        config: the name of the config.
        file: the absolute path of the golden.
        state: the result of the comparison.
        differences: the differences from the golden to the config.
        text: the content that the golden would have now; "" if the config does not exist or is broken.
        error: the reason why the config or the golden cannot be read; None if both can be read.
    """

    config: str
    file: str
    state: GoldenState
    differences: tuple[Difference, ...] = ()
    text: str = ""
    error: ForgatherError | None = None


def compare_goldens(meta: ProjectMeta, names: Sequence[str] = ()) -> list[GoldenCheck]:
    """Returns the comparison of each golden with its config.

    Args:
        meta: the project.
        names: the names of the configs; if empty, all configs, followed by goldens whose config does not exist.

    Raises:
        ProjectError: FG405 if a named config does not exist.
    """
    available = list(config_files(meta.searchdir, meta.config_prefix))
    chosen = list(dict.fromkeys(choose_config(meta, name) for name in names)) or available
    checked = [_compare_golden(meta, config) for config in chosen]
    if not names:
        checked += [
            GoldenCheck(config=name, file=golden_file(meta, name), state=GoldenState.LOST)
            for name in _existing_goldens(meta)
            if name not in available
        ]
    return checked


def update_golden(checked: GoldenCheck) -> bool:
    """Writes the current graph into a golden, or removes a golden without config; returns whether anything changed.

    Raises:
        ProjectError: FG431 if the file cannot be written, or is not a golden.
    """
    if checked.state is GoldenState.LOST:
        _remove(checked.file)
        return True
    before = _read_golden_text(checked.file)
    if not checked.text or checked.text == before:
        return False
    # A file that is not a golden is the user's own, so it is kept; an empty one is not.
    if before != "" and os.path.lexists(checked.file) and not (before or "").startswith(_HEAD):
        raise ProjectError(
            f"{checked.file!r} is not a golden, and is not overwritten",
            code="FG431",
            hint=_NOT_OURS,
        )
    try:
        os.makedirs(os.path.dirname(checked.file), exist_ok=True)
        with open(checked.file, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(checked.text)
    except OSError as error:
        raise _unwritable(checked.file, error) from error
    return True


def _remove(file: str) -> None:
    try:
        os.remove(file)
    except OSError as error:
        raise _unwritable(file, error) from error
    # A folder that still has files is kept.
    with suppress(OSError):
        os.removedirs(os.path.dirname(file))


def _unwritable(file: str, error: OSError) -> ProjectError:
    return ProjectError(
        f"the golden {file!r} cannot be written: {error.strerror or error}",
        code="FG431",
        hint="goldens are stored in the project's folder, next to its meta.yaml",
    )


def golden_file(meta: ProjectMeta, config: str) -> str:
    """Returns the absolute path of a config's golden.

    Args:
        meta: the project.
        config: the name of the config.
    """
    return os.path.join(meta.project_dir, FOLDER, *config.split("/"))


def golden_text(graph: Graph) -> str:
    """Returns the text of a golden that contains the graph."""
    return hide(_HEAD + emit_yaml(graph), is_document=True)


def read_golden(file: str) -> Graph:
    """Returns the graph of a golden; the origin of each value is its line in the file.

    Raises:
        ProjectError: FG432 if the file cannot be read, or is not a golden.
    """
    text = _read_golden_text(file)
    if text is None or not text.startswith(_HEAD):
        problem = "cannot be read" if text is None else "is not a golden: its first line differs"
        raise _no_golden(file, problem, hint=_NOT_OURS)
    return _graph_of(text, file)


def _graph_of(text: str, file: str) -> Graph:
    starts, origins, offset = [], [], 0
    # Each line is its own origin, so that differences are located in the golden.
    for number, line in enumerate(text.split("\n"), start=1):
        starts.append(offset)
        origins.append(Origin((Site(Span(file, number), os.path.basename(file)),)))
        offset += len(line) + 1
    rendered = RenderedText(
        name=os.path.basename(file),
        file=file,
        text=text,
        source_map=SourceMap(text, starts, origins),
        sources={file: SourceFile(file, text)},
    )
    try:
        return load(rendered)
    except ForgatherError as error:
        raise _no_golden(file, f"cannot be read: {error.message}", error.span) from error


def _compare_golden(meta: ProjectMeta, config: str) -> GoldenCheck:
    file = golden_file(meta, config)
    try:
        graph = machine_independent_graph(machine_independent_project(meta, config))
        text = golden_text(graph)
    except ForgatherError as error:
        return GoldenCheck(config=config, file=file, state=GoldenState.BROKEN, error=error)
    if not os.path.lexists(file):
        return GoldenCheck(config=config, file=file, state=GoldenState.MISSING, text=text)
    try:
        # A golden contains no secrets, so it is compared with the graph of a text without secrets.
        differences = diff(read_golden(file), _graph_of(text, file) if HIDDEN in text else graph)
    except ForgatherError as error:
        return GoldenCheck(config=config, file=file, state=GoldenState.BROKEN, text=text, error=error)
    state = GoldenState.DIFFERS if differences else GoldenState.SAME
    return GoldenCheck(config=config, file=file, state=state, differences=differences, text=text)


def _existing_goldens(meta: ProjectMeta) -> Iterator[str]:
    """Yields the names of the goldens that exist; other files in the folder are ignored."""
    for name, file in config_files([meta.project_dir], FOLDER).items():
        if (_read_golden_text(file) or "").startswith(_HEAD):
            yield name


def _read_golden_text(file: str) -> str | None:
    try:
        return read_text(file, MAX_RECORD_BYTES)
    except (OSError, UnicodeDecodeError):
        return None


def _no_golden(
    file: str, problem: str, span: Span | None = None, hint: str = "'fgcli golden --update' writes it again"
) -> ProjectError:
    return ProjectError(
        f"the golden {os.path.basename(file)!r} {problem}",
        code="FG432",
        span=span or Span(file, 1),
        hint=hint,
    )
