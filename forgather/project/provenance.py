"""Compares what a past run depended on with the present.

The input is a `PastRun`; the output is rows for files, versions, data, environment variables and so on, each with its
state at the time of the run and its current state. Nothing is imported or constructed. For environment variables that
construction reads, only their presence is compared, because their values are not recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from forgather.cache_file import Digests
from forgather.config.graph import Call, Entry, Scalar
from forgather.config.path import format_path
from forgather.config.traverse import all_nodes, entries
from forgather.errors import ForgatherError
from forgather.project.defaults import changed_defaults, read_defaults
from forgather.project.dependencies import changed_data
from forgather.project.git_state import git_state
from forgather.project.metadata import ProjectMeta
from forgather.project.reader import reader_for
from forgather.project.run_reader import PastRun
from forgather.project.run_writer import environment_needed, runtime_facts
from forgather.project.versions import installed_versions
from forgather.redaction import HIDDEN


class Status(StrEnum):
    """What happened to a thing that a run depended on; the loss of a thing certainly changes the result."""

    SAME = "same"
    RESTORED = "restored"
    DIFFERS = "differs"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that a run depended on.

    Args:
        fate: the change since the run.
        what: the kind of the thing: "version", "data", "code" and so on.
        name: the name of the thing.
        then: the state at the time of the run.
        now: the current state.
    """

    fate: Status
    what: str
    name: str
    then: str
    now: str


def verify(run: PastRun, meta: ProjectMeta) -> list[Row]:
    """Returns a row for each thing that the run depended on; lost things come first.

    Args:
        run: the past run.
        meta: the project in which the run will be repeated.
    """
    rows = [
        *_record(run),
        *_sources(run),
        *_versions(run),
        *_git(run),
        *_data(run),
        *_environment(run),
        *_secrets(run),
        *_processors(run),
        *_checkpoint(run),
        *_constructors(run, meta),
    ]
    order = [Status.LOST, Status.DIFFERS, Status.RESTORED, Status.SAME]
    return sorted(rows, key=lambda row: order.index(row.fate))


def is_code_unchanged(run: PastRun) -> bool:
    """Returns whether the project exists and its Python files are equal to those that the run recorded."""
    if not os.path.isdir(run.project_dir):
        return False
    return all(row.fate is Status.SAME for row in _sources(run) if row.what == "code")


def _row(what: str, name: str, then: object, now: object, otherwise: Status = Status.DIFFERS) -> Row:
    fate = Status.SAME if then == now else otherwise
    return Row(fate=fate, what=what, name=name, then=_shown(then), now=_shown(now))


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _record(run: PastRun) -> Iterator[Row]:
    digest = Digests()
    for name, then in sorted(run.table("files").items()):
        now = digest(os.path.join(run.folder, *name.split("/")))
        words = "gone" if now is None else "as written" if now == then else "changed"
        yield _row("record", name, "as written", words, Status.LOST)


def _sources(run: PastRun) -> Iterator[Row]:
    digest = Digests()
    for here, folders, files in os.walk(os.path.join(run.folder, "templates")):
        # A repeated run may have imported the copies.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            copy = os.path.join(here, name)
            now = digest(run.original(copy))
            words = "gone; the run's copy is used" if now is None else "changed; the run's copy is used"
            what = "code" if name.endswith(".py") else "template"
            # The copy differs from the original where secrets were hidden, so the digest of the original is compared.
            then = run.table("redacted").get(os.path.relpath(copy, run.folder).replace(os.sep, "/"))
            same = now is not None and now == (then or digest(copy))
            if then is not None and not same:
                words = f"{words.partition(';')[0]}; the run's copy lacks its secrets"
            yield _row(
                what, run.place(copy), "kept", "kept" if same else words, Status.LOST if then else Status.RESTORED
            )


def _secrets(run: PastRun) -> Iterator[Row]:
    for path, node in all_nodes(run.built):
        if isinstance(node, Scalar) and isinstance(node.value, str) and HIDDEN in node.value:
            yield _row("secret", format_path(path), "given", "not kept; write !env NAME in the config", Status.LOST)


def _versions(run: PastRun) -> Iterator[Row]:
    then = run.table("versions")
    now = installed_versions([name for name in then if name != "python"])
    for name, version in then.items():
        lost = version is not None and now.get(name) is None
        yield _row("version", name, version, now.get(name), Status.LOST if lost else Status.DIFFERS)


def _git(run: PastRun) -> Iterator[Row]:
    then = run.table("git")
    if then:
        now = git_state(run.project_dir, run.output_dir) if os.path.isdir(run.project_dir) else None
        yield _row("git", "project", _commit(then), _commit(now or {}))


def _commit(state: dict[str, Any]) -> str:
    words = {True: " with changes", None: ", changes unknown"}.get(state.get("dirty", False), "")
    return f"{str(state.get('commit', 'none'))[:10]}{words}"


def _data(run: PastRun) -> Iterator[Row]:
    recorded = run.listed("data")
    changes = {name: (then, now) for name, then, now in changed_data(recorded, run.project_dir)}
    for item in recorded:
        then, now = changes.get(item["named"], ("", ""))
        yield _row("data", item["named"], then, now, Status.LOST)


def _environment(run: PastRun) -> Iterator[Row]:
    needed = environment_needed(run.built)
    for name, was_set in run.table("environment_needed").items():
        is_set = needed.get(name, name in os.environ)
        lost = bool(was_set) and not is_set
        yield _row("environment", name, _set(was_set), _set(is_set), Status.LOST if lost else Status.DIFFERS)
    for name, value in run.table("environment_read").items():
        # The repeated run uses the recorded graph, so a different value changes nothing.
        here = os.environ.get(name)
        if here is not None:
            now = here if here == value else "differs; the recorded value is used"
            yield _row("environment", name, value, now, Status.RESTORED)


def _set(value: object) -> str:
    return "set" if value else "not set"


def _processors(run: PastRun) -> Iterator[Row]:
    now = runtime_facts()
    for name, value in run.table("processors").items():
        yield _row("processors", name, value, now.get(name))


def _checkpoint(run: PastRun) -> Iterator[Row]:
    """Yields a row for the checkpoint from which the run resumed. A repeated run needs it at the same path."""
    for path, node in all_nodes(run.built):
        for entry in entries(node) if isinstance(node, Call) else ():
            if entry.key == "resume_from_checkpoint" and _names_a_checkpoint(entry):
                value = str(entry.value.value) if isinstance(entry.value, Scalar) else ""
                # With "auto" the repeated run finds no checkpoint in its new output folder.
                is_auto = value in ("auto", "True") and not os.path.isdir(value)
                now = value if os.path.isdir(value) else "starts from the beginning" if is_auto else "does not exist"
                lost = Status.DIFFERS if is_auto else Status.LOST
                yield _row("checkpoint", format_path(path), value, now, lost)


def _names_a_checkpoint(entry: Entry) -> bool:
    return isinstance(entry.value, Scalar) and bool(entry.value.value)


def _constructors(run: PastRun, meta: ProjectMeta) -> Iterator[Row]:
    reader = reader_for(meta)
    names = dict.fromkeys(
        node.constructor
        for _, node in all_nodes(run.built)
        if isinstance(node, Call) and node.submodule_searchpath is None
    )
    for name in names:
        try:
            reader.read(name)
        except ForgatherError as error:
            yield Row(fate=Status.LOST, what="constructor", name=name, then="called", now=error.message)
    now = read_defaults(run.built, meta)
    for item in changed_defaults(run.built, run.built, run.defaults, now):
        yield Row(
            fate=Status.DIFFERS,
            what="default",
            name=format_path(item.path),
            then=item.old.text.rstrip(","),
            now=item.new.text,
        )
