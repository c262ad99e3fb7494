"""Lineage of checkpoints: which run wrote each one, in which order, and which one a resume uses.

The checkpoints of an output folder are ordered by a serial number in their manifests. File times are not used, because
copying a folder changes them. A checkpoint whose manifest does not name a run is treated as older than all others.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import interrupted_replacements, list_checkpoints, restore_replaced, step_of
from forgather.ml.checkpoint.manifest import first_intact, read_manifest
from forgather.ml.checkpoint.storage import LocalStorage, Storage

NONE_INTACT = (
    "restore one from a copy, or start from the beginning: --resume never (resume_from_checkpoint: false), or move "
    "them away"
)
"""The hint of the errors that are raised if no checkpoint in a folder is intact."""

_LAST_SECOND = 1e11  # year 5138; `datetime` fails for timestamps beyond year 9999


@dataclass(frozen=True, slots=True)
class Origin:
    """The run that wrote a checkpoint, and the time at which it was written.

    Args:
        run: the id of the run; "" if the manifest does not name a run.
        max_steps: the number of optimizer steps for which the run was configured.
        serial: a number that is larger than the serial numbers of all checkpoints that existed in the output folder
            when this checkpoint was written.
        written: the time of writing, which is displayed and never used for ordering.

    Units:
        `written` is in seconds since 1970.
    """

    run: str = ""
    max_steps: int = 0
    serial: int = 0
    written: float = 0.0


def new_run() -> str:
    """Returns a new random id for a run, which does not depend on the seed; no random generator is changed."""
    return uuid.uuid4().hex[:16]


def next_origin(output_dir: Path, run: str, max_steps: int) -> dict[str, Any]:
    """Returns the "run" entry for the manifest of the next checkpoint in a folder.

    Args:
        output_dir: the folder that contains the checkpoints.
        run: the id of the run.
        max_steps: the number of optimizer steps for which the run is configured.
    """
    serial = 1 + max((origin_of(folder).serial for _, folder in list_checkpoints(output_dir)), default=0)
    return asdict(Origin(run, max_steps, serial, round(time.time(), 3)))


def origin_of(folder: Path) -> Origin:
    """Returns the origin of a checkpoint; an `Origin` with default values if the manifest contains no valid origin."""
    try:
        facts = read_manifest(folder).facts["run"]
        written = float(facts["written"])
        # Shown to people as a date; a damaged value must not make the whole checkpoint unreadable.
        if not 0 <= written < _LAST_SECOND:
            written = 0.0
        return Origin(str(facts["run"]), int(facts["max_steps"]), int(facts["serial"]), written)
    except (CheckpointError, ValueError, LookupError, TypeError, ArithmeticError):
        return Origin()


def checkpoints_in_order(output_dir: Path) -> list[tuple[Path, Origin]]:
    """Returns (folder, origin) of the checkpoints in a folder, grouped by run. The run that wrote last comes last.

    Within a run, the checkpoints are in the order in which they were written.
    """
    found = [(step, folder, origin_of(folder)) for step, folder in list_checkpoints(output_dir)]
    last: dict[str, int] = {}
    for _, _, origin in found:
        last[origin.run] = max(origin.serial, last.get(origin.run, 0))
    # All checkpoints of the run that wrote last come last, even if their steps are smaller than those of an earlier
    # run.
    found.sort(key=lambda item: (last[item[2].run], item[2].serial, item[0]))
    return [(folder, origin) for _, folder, origin in found]


def last_written(output_dir: Path) -> tuple[int, int]:
    """Returns the serial number and the step of the checkpoint that was written last into a folder, or (0, 0).

    A checkpoint that has a temporary name, because a crash interrupted its replacement, is included.
    """
    found = [(origin_of(folder).serial, step) for step, folder in list_checkpoints(output_dir)]
    # Otherwise the next checkpoint could get the serial number of the one that is restored later.
    found += [(origin_of(folder).serial, step_of(final)) for folder, final in interrupted_replacements(output_dir)]
    return max(found, default=(0, 0))


def newest_verified(
    output_dir: Path, *, without: Container[str] = (), storage: Storage | None = None
) -> tuple[Path | None, list[CheckpointError]]:
    """Returns the newest intact checkpoint, or None if there is none, and the errors of newer ones that are not intact.

    First, checkpoints are renamed back to their original names if a crash interrupted their replacement.

    Args:
        output_dir: the folder that contains the checkpoints.
        without: the names of files that may be missing, see `verify`.
        storage: the object through which checkpoints are renamed; the local file system by default.
    """
    # Only renames, no removal: a folder that looks abandoned may belong to a live process on another machine.
    with contextlib.suppress(OSError):  # resuming from a read-only folder is allowed
        restore_replaced(storage or LocalStorage(), output_dir)
    newest, skipped = first_intact(
        (folder for folder, _ in reversed(checkpoints_in_order(output_dir))), without=without
    )
    if newest is not None:
        skipped = _unreadable_manifests(output_dir, newest) | skipped
    return newest, list(skipped.values())


def _unreadable_manifests(output_dir: Path, chosen: Path) -> dict[Path, CheckpointError]:
    """Returns the errors of checkpoints with unreadable manifests and later steps than the chosen checkpoint.

    Such checkpoints are ordered before all others, so the search for the newest intact checkpoint did not reach them.
    """
    found = {}
    for step, folder in reversed(list_checkpoints(output_dir)):
        if step > step_of(chosen):
            try:
                read_manifest(folder)
            except CheckpointError as error:
                found[folder] = error
    return found


def describe_passed_over(chosen: Path) -> str:
    """Returns a description of other checkpoints that a user may have expected a resume to use; "" if there are none.

    Args:
        chosen: the folder of the checkpoint that the resume uses.
    """
    own = origin_of(chosen)
    others: dict[str, list[str]] = {}
    for step, folder in reversed(list_checkpoints(chosen.parent)):
        origin = origin_of(folder)
        if folder == chosen or origin.serial > own.serial:
            continue  # a newer one was skipped because it is not intact, and that is said already
        if not origin.run:
            reason = "they do not say which run wrote them" if own.run else ""
        elif origin.run != own.run:
            reason = f"of an earlier run of {origin.max_steps} steps"
        else:
            reason = "written earlier" if step > step_of(chosen) else ""
        if reason:
            others.setdefault(reason, []).append(folder.name)
    return "; ".join(f"{', '.join(_shortened(names))} ({reason})" for reason, names in others.items())


def _shortened(names: list[str], limit: int = 4) -> list[str]:
    return names if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
