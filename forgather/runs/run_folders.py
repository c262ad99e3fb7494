"""Finds run folders below a folder.

The input is a folder; the output is each run folder below it, with the state of its files, from which a reader sees
whether anything has changed. A run folder is found wherever it was moved to. Nothing is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from forgather.errors import ProjectError
from forgather.project.run_facts import FACTS, GRAPH
from forgather.run_status import STATUS_FILE

METRICS, SUMMARY, LABELS = "metrics.jsonl", "summary.json", "labels.json"
TRIALS, JOURNAL = "trials", "trials.jsonl"
"""The folder and the journal of a sweep's trials, inside the folder of the sweep."""
_FILES = frozenset((FACTS, GRAPH, STATUS_FILE, METRICS, SUMMARY, LABELS))
# One of these alone makes a folder that of a run; `summary.json` is a name that other programs use, too.
_MARKS = (FACTS, STATUS_FILE, METRICS)
_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages"))
_MAX_ENTRIES, _MAX_DEPTH = 2_000_000, 40

FileState = tuple[int, int, int]
"""The time of the last change in nanoseconds, the size in bytes, and the number of a file's inode."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run folder.

    Args:
        folder: the absolute path of the folder.
        files: the states of those of its files that a summary is read from, by name.
    """

    folder: str
    files: dict[str, FileState]


def find_runs(top: str) -> list[FoundRun]:
    """Returns the run folders in a folder and its subfolders, in the order of their paths.

    Folders inside run folders and checkpoints are not searched, and symbolic links are not followed.

    Args:
        top: the folder. A run folder gives itself.

    Raises:
        ProjectError: FG500 if the folder does not exist or is too large to be searched.
    """
    path = os.path.realpath(top)
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise ProjectError(f"{top!r} {what}", code="FG500", hint="name a folder that contains runs")
    found: list[FoundRun] = []
    todo, count = [(path, 0)], 0
    while todo:
        here, depth = todo.pop()
        files, folders, size = _content(here)
        count += size
        if count > _MAX_ENTRIES:
            raise ProjectError(
                f"{top!r} has more than {_MAX_ENTRIES:,} entries",
                code="FG500",
                hint="name a folder nearer to the runs, such as an output folder",
            )
        if any(mark in files for mark in _MARKS):
            found.append(FoundRun(here, files))
        elif depth < _MAX_DEPTH:
            todo += [(folder, depth + 1) for folder in folders]
    return sorted(found, key=lambda run: run.folder)


def newest_run(folders: Iterable[str]) -> str | None:
    """Returns the run that was started last, by the name of its folder; None without any.

    Args:
        folders: the run folders of one output folder.
    """

    def rank(folder: str) -> tuple[str, int, str]:
        # Two runs of one second have names that differ by a number at the end.
        name = os.path.basename(folder)
        return name.partition("-")[0], len(name), name

    return max(folders, key=rank, default=None)


def earlier_attempts(folders: Iterable[str]) -> set[str]:
    """Returns the runs that were earlier attempts at a trial of a sweep: the newest attempt continued them.

    Args:
        folders: run folders.
    """
    by_parent: dict[str, list[str]] = {}
    for folder in folders:
        by_parent.setdefault(os.path.dirname(folder), []).append(folder)
    found: set[str] = set()
    for parent, attempts in by_parent.items():
        if len(attempts) > 1 and is_in_trial(parent):
            found |= set(attempts) - {newest_run(attempts)}
    return found


def is_in_trial(folder: str) -> bool:
    """Returns whether a folder of runs is that of a trial, SWEEP/trials/NUMBER/runs, of a sweep with a journal.

    Args:
        folder: the folder that contains the runs.
    """
    trials, number = os.path.split(os.path.dirname(folder))
    sweep, name = os.path.split(trials)
    return name == TRIALS and number.isdecimal() and os.path.isfile(os.path.join(sweep, JOURNAL))


def file_states(folder: str) -> dict[str, FileState]:
    """Returns the states of the files of a run folder, by name; a file that is not there is left out.

    Args:
        folder: the run folder.
    """
    found: dict[str, FileState] = {}
    for name in _FILES:
        with suppress(OSError):
            facts = os.stat(os.path.join(folder, name))
            if stat.S_ISREG(facts.st_mode):
                found[name] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
    return found


def _content(folder: str) -> tuple[dict[str, FileState], list[str], int]:
    """Returns the states of a folder's known files, its subfolders that may contain runs, and its number of entries."""
    files: dict[str, FileState] = {}
    folders: list[str] = []
    count = 0
    # A folder that cannot be read, or was removed meanwhile, has nothing to list.
    for entry in _entries(folder):
        count += 1
        name = entry.name
        if name in _FILES:
            try:
                facts = entry.stat()
            except OSError:
                continue
            if stat.S_ISREG(facts.st_mode):
                files[name] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        elif name[0] != "." and name not in _SKIPPED and not name.startswith("checkpoint-") and _is_folder(entry):
            folders.append(entry.path)
    return files, folders, count


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
