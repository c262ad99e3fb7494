"""Repeats a past run.

The input is a `PastRun` and an output folder; the output is a `Project` that builds the recorded graph and writes to
that folder, a completed record of the repeated run, and a comparison of the losses of both runs. Nothing is written
into the folders of the first run. The Python files in the project's folder are used only if they are unchanged;
otherwise their recorded copies are used.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from forgather.cache_file import Digests
from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import Scalar
from forgather.config.path import GraphPath, Key, format_path
from forgather.config.traverse import all_nodes
from forgather.errors import ProjectError
from forgather.project.locations import cache_dir, library_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.project import Project
from forgather.project.provenance import is_code_unchanged
from forgather.project.run_facts import FACTS, GRAPH
from forgather.project.run_reader import PastRun
from forgather.project.run_writer import OVERRIDES, overrides_text
from forgather.project.trust import is_inside
from forgather.redaction import hidden, hide

LOSS = "loss.jsonl"
_FOLDERS = ("output_dir", "logging_dir", "log_dir", "run_dir")
_FIRST_RUN_FACTS = (
    "project", "project_dir", "workspace_root", "library", "config", "template", "instant", "hostname", "uname",
    "environment_read", "search_path", "system_path",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The comparison of the loss files of two runs.

    Args:
        same: whether the files are equal byte for byte.
        lines: the number of lines in the file of the first run; None if the first run has no such file.
        first: the number of the first line that differs, counted from 1; None if the common part is equal.
        continues: whether the file of the second run contains all lines of the first one, and further lines.
    """

    same: bool
    lines: int | None
    first: int | None = None
    continues: bool = False

    @property
    def differ(self) -> bool:
        """Whether the second run does not repeat the first one.

        If the first run ended early, its file is only a part of the second one, and the runs do not differ.
        """
        return self.lines is not None and not (self.same or self.continues)


def new_output_dir(run: PastRun, given: str | None, now: datetime) -> str:
    """Returns the output folder of the repeated run: the given one, or `<output folder>/reruns/<time>`.

    Args:
        run: the first run.
        given: the value of `--output-dir`; None if the option is not given.
        now: the time for the name of the folder.

    Raises:
        ProjectError: FG439 if the folder is the output folder of the first run, or inside its run folder.
    """
    folder = os.path.abspath(os.path.expanduser(given)) if given else None
    if folder is None:
        return os.path.join(run.output_dir, "reruns", f"{now:%Y%m%dT%H%M%SZ}")
    real = os.path.realpath(folder)
    if real == os.path.realpath(run.output_dir) or is_inside(real, run.folder):
        what = "in the folder" if real != os.path.realpath(run.output_dir) else "the output folder"
        raise ProjectError(
            f"{given!r} is {what} of the first run, which would be overwritten",
            code="FG439",
            hint="name another folder, or leave --output-dir out",
        )
    return folder


def rerun_meta(run: PastRun) -> ProjectMeta:
    """Returns the project in which the run is repeated: if its code has changed, the copy that the run recorded."""
    real = is_code_unchanged(run)
    system = [str(folder) for folder in run.listed("system_path")]
    return ProjectMeta(
        project_dir=run.project_dir if real else run.archive,
        workspace_root=None,
        name=str(run.facts.get("project", "")),
        description="",
        searchdir=(),
        config_prefix="",
        default_config=None,
        default_config_span=None,
        system_path=tuple(system if real else map(run.archived, system)),
        searchpath=(run.folder, library_dir()),
        diagnostics=(),
        files=(),
        env_reads={},
        dependencies=None,
    )


def rerun_project(run: PastRun, meta: ProjectMeta, output_dir: str, changes: Sequence[tuple[str, str]] = ()) -> Project:
    """Returns the config that builds the recorded graph, and writes its output to another folder.

    Args:
        run: the first run.
        meta: the project in which the run is repeated.
        output_dir: the output folder of the repeated run.
        changes: further changes of the graph, as pairs of graph path and YAML text.
    """
    environment = ConfigEnvironment(searchpath=(run.folder,), cache_dir=cache_dir("templates"))
    overrides = [*_redirected_outputs(run, output_dir), *changes]
    return Project.in_environment(meta, run.config, environment=environment, overrides=overrides, template=GRAPH)


@contextmanager
def unchanged_record(run: PastRun, meta: ProjectMeta) -> Iterator[None]:
    """Context manager that keeps Python from writing compiled code next to the sources in a run folder.

    The run folder is a record and must not change.

    Args:
        run: the run.
        meta: the project whose sources are used.
    """
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = before or meta.project_dir == run.archive
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _redirected_outputs(run: PastRun, output_dir: str) -> list[tuple[str, str]]:
    """Returns the overrides that replace the output folder of the first run, as pairs of graph path and YAML text.

    Args:
        run: the first run.
        output_dir: the output folder of the repeated run.
    """
    # Both: the folder may have been moved since the run.
    old = {str(run.facts.get("output_dir", run.output_dir)), run.output_dir}
    found: list[tuple[str, str]] = []
    for path, node in all_nodes(run.built):
        text = node.value if isinstance(node, Scalar) else None
        if isinstance(text, str) and text and path:
            new = _moved(os.path.abspath(os.path.expanduser(text)), path, old, output_dir)
            if new is not None:
                found.append((format_path(path), json.dumps(new)))
    return found


def _moved(folder: str, path: GraphPath, old: set[str], new: str) -> str | None:
    if folder in old:
        return new
    key = path[-1].name if isinstance(path[-1], Key) else None
    inside = next((folder[len(top) + 1 :] for top in old if folder.startswith(top + os.sep)), None)
    return os.path.join(new, inside) if inside is not None and key in _FOLDERS else None


def complete_record(folder: str, run: PastRun, project: Project) -> None:
    """Completes the folder of a repeated run, so that the run can be compared and repeated like the first one.

    Args:
        folder: the folder of the repeated run.
        run: the first run.
        project: the config that was built.
    """
    variables, overrides = run.changes
    # The repeated run rendered the recorded graph, so its own copies are not the templates of the config.
    kept = os.path.join(folder, "templates")
    shutil.rmtree(kept, ignore_errors=True)
    with suppress(FileNotFoundError):
        # A link is copied as a link: its target was never a part of the record.
        shutil.copytree(os.path.join(run.folder, "templates"), kept, symlinks=True, ignore=_pipes)
    with open(os.path.join(folder, OVERRIDES), "w", encoding="utf-8", newline="\n") as stream:
        stream.write(hide(overrides_text(variables, [*overrides, *project.overrides]), is_document=True))
    with open(os.path.join(folder, FACTS), encoding="utf-8") as stream:
        facts = json.load(stream)
    host = facts.get("hostname")
    # The record describes the config of the first run, with the folders and the clock of that time.
    facts |= {name: run.facts[name] for name in _FIRST_RUN_FACTS if name in run.facts}
    facts |= {"rerun_of": run.folder, "ran_on": host, "files": _digests(folder)}
    with open(os.path.join(folder, FACTS), "w", encoding="utf-8", newline="\n") as stream:
        stream.write(json.dumps(hidden(facts), indent=2) + "\n")


def _pipes(folder: str, names: list[str]) -> list[str]:
    """Returns the names that cannot be copied, because they are neither files nor folders nor links."""
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    modes = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
    return [name for name, mode in modes if not any(kind(mode) for kind in kinds)]


def _digests(folder: str) -> dict[str, str]:
    digest, found = Digests(), {}
    for here, _, files in os.walk(folder):
        for name in sorted(files):
            file = os.path.join(here, name)
            known = digest(file) if name != FACTS else None
            if known is not None:
                found[os.path.relpath(file, folder).replace(os.sep, "/")] = known
    return dict(sorted(found.items()))


def compare_losses(first: str, second: str) -> Losses:
    """Returns the comparison of the loss files of two run folders.

    Args:
        first: the folder of the first run.
        second: the folder of the second run.
    """
    ours, theirs = (_read_lines(os.path.join(folder, LOSS)) for folder in (first, second))
    if ours is None:
        return Losses(same=False, lines=None)
    theirs = theirs or []
    differ = (number for number, pair in enumerate(zip(ours, theirs, strict=False), start=1) if pair[0] != pair[1])
    line = next(differ, None)
    return Losses(same=ours == theirs, lines=len(ours), first=line, continues=line is None and len(theirs) > len(ours))


def _read_lines(file: str) -> list[bytes] | None:
    try:
        with open(file, "rb") as stream:
            return stream.read().splitlines(keepends=True)
    except OSError:
        return None
