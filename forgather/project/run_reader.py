"""Reads the folder of a past run.

The input is a folder that `run_writer` wrote; the output is a `PastRun` with the graph that was built, and the recorded
environment. The graph is read from `graph.yaml`. The recorded templates are rendered, too: if they give the same graph,
the locations of values are lines of these templates, otherwise lines of `graph.yaml`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from forgather.bounded import read_bytes
from forgather.config.environment import ConfigEnvironment
from forgather.config.equality import same_graph
from forgather.config.graph import Graph
from forgather.config.load import load, load_value
from forgather.config.override import override
from forgather.config.render import render
from forgather.errors import Diagnostic, ForgatherError, ProjectError, Severity
from forgather.project.configs import config_stem
from forgather.project.dynamic_args import without_options
from forgather.project.literal import plain_value
from forgather.project.locations import cache_dir, library_dir
from forgather.project.path_display import Display
from forgather.project.run_facts import FACTS, FORM, GRAPH, is_run_folder, read_facts
from forgather.project.run_writer import OVERRIDES, SIGNATURES
from forgather.project.versions import VersionTable
from forgather.source import Span

_LISTED = 5
# Files that callbacks write into the folder of every run.
_MEASURED = ("summary.json", "metrics.jsonl", "loss.jsonl")
_MAX_BYTES = 100_000_000


@dataclass(frozen=True)
class PastRun:
    """A past run.

    Args:
        folder: the absolute folder of the run.
        facts: the content of `run.json`.
    """

    folder: str
    facts: Mapping[str, Any]

    @property
    def form(self) -> int | None:
        """The number of the folder's format; None for a folder that was written before formats had numbers."""
        form = self.facts.get("form")
        return form if isinstance(form, int) else None

    @property
    def config(self) -> str:
        """The name of the config."""
        return str(self.facts.get("config", GRAPH))

    @property
    def project_dir(self) -> str:
        """The absolute folder of the project at the time of the run."""
        return str(self.facts.get("project_dir", self.folder))

    @property
    def output_dir(self) -> str:
        """The absolute output folder that contains the run folder now, even if both were moved."""
        return os.path.dirname(os.path.dirname(self.folder))

    @property
    def processes(self) -> int:
        """The number of processes of the run on all machines; 1 if the number is not recorded."""
        total = self.table("processes").get("total")
        return total if isinstance(total, int) and total > 0 else 1

    @property
    def archive(self) -> str:
        """The folder that contains the recorded copy of the project."""
        return os.path.join(self.folder, "templates", "project")

    def listed(self, key: str) -> list[Any]:
        """Returns a list in `run.json`; an empty list if the key is missing."""
        found = self.facts.get(key)
        return found if isinstance(found, list) else []

    def table(self, key: str) -> dict[str, Any]:
        """Returns a mapping in `run.json`; an empty dict if the key is missing."""
        found = self.facts.get(key)
        return found if isinstance(found, dict) else {}

    @cached_property
    def built(self) -> Graph:
        """The graph that was built; the location of each value is its line in `graph.yaml`."""
        try:
            return load(render(ConfigEnvironment(searchpath=(self.folder,)), GRAPH))
        except ForgatherError as error:
            raise _damaged(self.folder, GRAPH, error.message, error.span) from error

    @cached_property
    def graph(self) -> Graph:
        """The graph that was built; values are located in the recorded templates if these still give the same graph."""
        if self.rendered_again is None:
            return self.built
        again = without_options(self.rendered_again)
        return again if same_graph(again, self.built) else self.built

    @cached_property
    def changes(self) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
        """The changes by the command line: Jinja variables, and overrides as pairs of graph path and YAML text."""
        if self.form is None and not os.path.lexists(os.path.join(self.folder, OVERRIDES)):
            return {}, ()
        try:
            text = _read(self.folder, OVERRIDES)
            kept = plain_value(load_value(text, os.path.join(self.folder, OVERRIDES)), OVERRIDES)
            if not isinstance(kept, dict):
                raise TypeError("it is not a mapping")
            pairs = tuple((str(item["path"]), str(item["value"])) for item in kept.get("overrides") or ())
            return dict(kept.get("variables") or {}), pairs
        except (ForgatherError, OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(self.folder, OVERRIDES, _error_text(error)) from error

    @cached_property
    def defaults(self) -> dict[str, dict[str, str | None]]:
        """The default arguments of the constructors that were called; empty if they are not recorded."""
        kept = self._signatures or {}
        return {str(name): dict(table) for name, table in kept.items() if isinstance(table, dict)}

    @cached_property
    def _signatures(self) -> dict[str, Any] | None:
        try:
            found = json.loads(_read(self.folder, SIGNATURES))
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """The findings about the record: another format, or default arguments that cannot be read."""
        if self.form == FORM:
            return () if self._signatures is not None else (self._no_defaults(),)
        if self.form is None:
            message = f"{os.path.basename(self.folder)!r} is a run folder of an older format: it has no form number"
            hint = "defaults of signatures, code and data of that run are not known, and are not compared"
        else:
            age = "a newer" if self.form > FORM else "an older"
            message = f"{os.path.basename(self.folder)!r} is a run folder of {age} format: form {self.form}"
            hint = f"this version writes form {FORM}; facts that it does not know are not compared"
        span = Span(os.path.join(self.folder, FACTS), 1)
        return (Diagnostic(code="FG435", message=message, severity=Severity.WARNING, span=span, hint=hint),)

    def _no_defaults(self) -> Diagnostic:
        return Diagnostic(
            code="FG438",
            message=f"the record of the run {os.path.basename(self.folder)!r} is damaged: {SIGNATURES} cannot be read",
            severity=Severity.WARNING,
            span=Span(os.path.join(self.folder, SIGNATURES), 1),
            hint="defaults of signatures are not compared",
        )

    def environment(self) -> ConfigEnvironment:
        """Returns the environment that the templates of the run saw, from facts in the run's folder only."""
        read = self.table("environment_read")

        def env(name: str, default: object = None) -> object:
            return read.get(name, default)

        recorded = self.facts.get("instant")
        variables = {
            "project_dir": self.project_dir,
            "workspace_root": self.facts.get("workspace_root") or self.project_dir,
            "hostname": self.facts.get("hostname"),
            "uname": self.table("uname"),
            "versions": VersionTable(self.table("versions")),
            "config_stem": config_stem(self.config),
            "env": env,
        }
        return ConfigEnvironment(
            searchpath=tuple(map(self.archived, map(str, self.listed("search_path")))),
            variables=variables,
            now=datetime.fromisoformat(str(recorded)) if recorded else None,
            cache_dir=cache_dir("templates"),
        )

    def archived(self, path: str) -> str:
        """Returns the path of the recorded copy of a file or folder."""
        if path == self._library:
            return os.path.join(self.folder, "templates", "lib")
        if path == self.project_dir:
            return self.archive
        return os.path.join(self.folder, "templates", *self._display.archive_name(path).split("/"))

    def original(self, file: str) -> str:
        """Returns the path of which `file` is the recorded copy; `file` itself if it is not a recorded copy."""
        inside = os.path.relpath(file, os.path.join(self.folder, "templates")).replace(os.sep, "/")
        label, _, rest = inside.partition("/")
        workspace = str(self.facts.get("workspace_root") or "")
        tops = {"lib": library_dir(), "project": self.project_dir, "workspace": workspace, "other": os.sep}
        return os.path.join(tops[label], rest) if label in tops and rest else file

    def place(self, file: str) -> str:
        """Returns the short name of a file; for a recorded copy, the short name of the original."""
        return Display(self.project_dir, self.facts.get("workspace_root"))(self.original(file))

    @property
    def _library(self) -> str:
        search = self.listed("search_path")
        return str(self.facts.get("library") or (search[-1] if search else library_dir()))

    @property
    def _display(self) -> Display:
        workspace = self.facts.get("workspace_root")
        return Display(self.project_dir, workspace, relative_to_cwd=False, library=self._library)

    @cached_property
    def rendered_again(self) -> Graph | None:
        """The graph of the recorded templates, with the declaration of options; None if rendering or loading fails."""
        try:
            variables, overrides = self.changes
            template = str(self.facts.get("template") or f"configs/{self.config}")
            return override(load(render(self.environment(), template, variables)), list(overrides))
        except (ForgatherError, ValueError, TypeError, KeyError):
            # Templates of an older release may not render anymore; the graph itself is recorded, too.
            return None


def runs_of(project_dir: str) -> list[str]:
    """Returns the run folders in a project's default output folders, newest first."""
    models = _listed(os.path.join(project_dir, "output_models"))
    found = [run for model in models for run in recorded_runs(model)]
    return sorted(found, key=os.path.basename, reverse=True)


def recorded_runs(output_dir: str) -> list[str]:
    """Returns the run folders in an output folder, oldest first."""
    return _folders(os.path.join(output_dir, "runs"))


def open_run(folder: str) -> PastRun:
    """Returns the run in a folder.

    Raises:
        ProjectError: FG437 if the folder is not that of a run; FG438 if the record of the run is damaged.
    """
    # For a link, the output folder is that of its target.
    path = os.path.realpath(folder)
    if not is_run_folder(path):
        raise _no_run(folder, path)
    try:
        return PastRun(path, read_facts(_read(path, FACTS)))
    except (OSError, ValueError) as error:
        raise _damaged(path, FACTS, _error_text(error)) from error


def _no_run(folder: str, path: str) -> ProjectError:
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
    else:
        missing = [name for name in (FACTS, GRAPH) if not os.path.isfile(os.path.join(path, name))]
        what = f"is not the folder of a run: it has no {' and no '.join(map(repr, missing))}"
        if len(missing) > 1 and any(os.path.isfile(os.path.join(path, name)) for name in _MEASURED):
            return _unrecorded(folder)
    near = sorted(_runs_near(path), reverse=True)
    more = f" and {len(near) - _LISTED} more" if len(near) > _LISTED else ""
    return ProjectError(
        f"{folder!r} {what}",
        code="FG437",
        hint=f"runs there, newest first: {', '.join(near[:_LISTED])}{more}" if near
        else "a run's folder is <output folder>/runs/<time>-<config>",
    )  # fmt: skip


def _unrecorded(folder: str) -> ProjectError:
    return ProjectError(
        f"{folder!r} is the folder of a run without a record: the run was not started by 'fgcli train'",
        code="FG437",
        hint="scripts, and code written by 'fgcli code', record measurements but no config; compare the configs",
    )


def _runs_near(path: str) -> Iterable[str]:
    """Returns the run folders near a path, relative to the working folder.

    The nearest existing folder is searched: first the folder itself, then its subfolder `runs`, its parent folder, the
    `runs` folders in its subfolders, and the output folders of the project in it. The runs in the first place that
    contains any are returned.
    """
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    for folder in (path, os.path.join(path, "runs"), os.path.dirname(path)):
        runs = _folders(folder)
        if runs:
            return [os.path.relpath(run) for run in runs]
    within = [run for model in _listed(path) for run in recorded_runs(model)]
    return [os.path.relpath(run) for run in within or runs_of(path)]


def _folders(folder: str) -> list[str]:
    return [path for path in _listed(folder) if is_run_folder(path)]


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.path.join(folder, name) for name in os.listdir(folder))
    except OSError:
        return []


def _read(folder: str, name: str) -> str:
    """Returns the text of a file in the record of a run.

    Raises:
        OSError: if the file is missing, cannot be read, or is too large.
        ValueError: if the file is not text in UTF-8.
    """
    try:
        return read_bytes(os.path.join(folder, name), _MAX_BYTES).decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None


def _error_text(error: Exception) -> str:
    return str(getattr(error, "message", None) or getattr(error, "strerror", None) or error)


def _damaged(folder: str, name: str, problem: str, span: Span | None = None) -> ProjectError:
    return ProjectError(
        f"the record of the run {os.path.basename(folder)!r} is damaged: {name}: {problem}",
        code="FG438",
        span=span or Span(os.path.join(folder, name), 1),
        hint="the files of a run folder are not meant to be edited; take it from a backup",
    )
