"""Removes and archives run folders.

The input is run folders; the output is the same folders gone, or packed into `<output folder>/runs/archive/`. Nothing
outside a run folder is touched: checkpoints and models belong to the output folder. A folder without the record of a
run, a run that goes on, and a run that another one refers to are refused before anything is changed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forgather.errors import ProjectError
from forgather.project.path_display import near_path
from forgather.project.run_facts import FACTS, GRAPH, is_run_folder
from forgather.run_status import Status, read_status
from forgather.runs.references import output_folder, references_to
from forgather.runs.summary import RunSummary

ARCHIVE = "archive"
_STILL_SECONDS = 600.0
"""Units: seconds. A run that says nothing about its end may go on if one of its files is younger, and so may one of
another machine, whose clock may differ, if its heartbeat is.
"""
_LISTED = 4


@dataclass(frozen=True)
class Usage:
    """The disk space of files.

    Args:
        num_files: the number of files.
        num_bytes: their size in bytes.
    """

    num_files: int = 0
    num_bytes: int = 0


def disk_usage(folder: str) -> Usage:
    """Returns the disk space of the files in a folder; links are not followed."""
    count = size = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(here, name)).st_size
            except OSError:
                continue
            count += 1
    return Usage(count, size)


def kept_checkpoints(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Returns the names of the checkpoints in the output folders of runs, which stay, by output folder."""
    kept: dict[str, list[str]] = {}
    for output_dir in dict.fromkeys(output_folder(run.folder) for run in runs):
        try:
            names = sorted(os.listdir(output_dir)) if output_dir is not None else []
        except OSError:
            continue
        found = [name for name in names if name.startswith("checkpoint-")]
        if output_dir is not None and found:
            kept[output_dir] = found
    return kept


def refuse_needed(runs: Sequence[RunSummary], others: Sequence[RunSummary], word: str) -> None:
    """Raises an error if a folder is not that of a run alone, if a run goes on, or if a run that stays refers to it.

    Args:
        runs: the runs that are to go.
        others: the runs that may refer to them.
        word: the verb for the message, such as "removed".

    Raises:
        ProjectError: FG503 with the names of the runs that must stay.
    """
    # A metrics file alone makes a folder one of the list, and it may be anything: an output folder, or a project.
    other = next((run for run in runs if not is_run_folder(run.folder)), None)
    if other is not None:
        raise ProjectError(
            f"{near_path(other.folder)} has metrics and no record of a run ({FACTS}, {GRAPH}), and cannot be {word}",
            code="FG503",
            hint="it may contain other files than those of a run: remove it by hand",
        )
    live = [run for run in runs if _goes_on(run)]
    if live:
        names = _names([run.name for run in live])
        raise ProjectError(
            f"{names} {'goes' if len(live) == 1 else 'go'} on, and cannot be {word}",
            code="FG503",
            hint="wait until it has ended, or stop it first",
        )
    found = references_to(runs, others)
    if found:
        texts = [f"{one.run.name}: {one.referrer.name} {one.how}" for one in found]
        raise ProjectError(
            f"{len({one.run.folder for one in found})} of {len(runs)} cannot be {word}, because others refer to it: "
            + _names(texts, "; "),
            code="FG503",
            hint=f"name those as well, to have all of them {word}, or leave it out",
        )


def _goes_on(run: RunSummary) -> bool:
    status = read_status(run.folder)
    if status is not None and status.status is Status.KILLED and not status.is_here:
        return time.time() - status.updated < _STILL_SECONDS
    if status is not None:
        return status.status.is_live
    return run.status is None and time.time() - _last_change(run.folder) < _STILL_SECONDS


def _last_change(folder: str) -> float:
    times = [0.0]
    with os.scandir(folder) as entries:
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max(times)


def _names(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return between.join(names[:_LISTED]) + more


def remove_run(folder: str) -> None:
    """Removes a run folder.

    Raises:
        ProjectError: FG503 if it cannot be removed completely; the message says what is left.
    """
    parent, name = os.path.split(folder)
    # Under a hidden name first, so that an interrupted removal leaves no half of a run in a list.
    aside = os.path.join(parent, f".{name}.removed")
    try:
        os.rename(folder, aside)
        shutil.rmtree(aside)
    except OSError as error:
        left = aside if os.path.exists(aside) else folder
        raise ProjectError(
            f"{left!r} cannot be removed: {error.strerror or error}",
            code="FG503",
            hint="change the permissions of the folder, and remove it by hand",
        ) from error


def archive_run(folder: str) -> str:
    """Packs a run folder into one file next to the other runs, removes the folder, and returns the path of the file.

    Raises:
        ProjectError: FG503 if the file exists or cannot be written; the run folder stays then.
    """
    import tarfile  # a late import, of the one action that needs it

    parent, name = os.path.split(folder)
    file = os.path.join(parent, ARCHIVE, f"{name}.tar.gz")
    draft = f"{file}.part"
    if os.path.lexists(file):
        raise ProjectError(f"{file!r} exists", code="FG503", hint="move it away, or rename the run folder")
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with tarfile.open(draft, "w:gz") as archive:
            archive.add(folder, arcname=name)
        with open(draft, "rb") as stream:
            os.fsync(stream.fileno())
        _verify(draft, folder)
        os.rename(draft, file)
    except (OSError, tarfile.TarError) as error:
        if os.path.exists(draft):
            os.remove(draft)
        raise ProjectError(
            f"{folder!r} cannot be archived: {getattr(error, 'strerror', None) or error}",
            code="FG503",
            hint="the run folder is unchanged: make room, or change the permissions, and try again",
        ) from error
    remove_run(folder)
    return file


def _verify(file: str, folder: str) -> None:
    """Reads an archive to its end, and compares the sizes of its files with those of the folder.

    Raises:
        OSError: if a file is missing from the archive or has another size.
    """
    import tarfile

    with tarfile.open(file, "r:gz") as archive:
        packed = {member.name: None if member.islnk() else member.size for member in archive}
    for here, _, names in os.walk(folder):
        for path in (os.path.join(here, name) for name in names):
            name = os.path.relpath(path, os.path.dirname(folder))
            size = os.lstat(path).st_size if os.path.isfile(path) and not os.path.islink(path) else None
            if name not in packed or (size is not None and packed[name] not in (None, size)):
                raise OSError(f"{name!r} has changed while it was packed")
