"""Which run wrote a checkpoint, and in what order the checkpoints of a folder were written.

Takes an output folder; gives its checkpoints from the oldest to the newest. Keeps true: the order is that of a
counter inside the manifests, never of file times, which a copy changes; a checkpoint that says nothing of its run
counts as older than every one that does.
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
from forgather.ml.checkpoint.checkpoint_dir import bring_back, half_replaced, list_checkpoints, step_of
from forgather.ml.checkpoint.manifest import first_intact, read_manifest
from forgather.ml.checkpoint.storage import LocalStorage, Storage

NONE_INTACT = (
    "restore one from a copy; or begin anew: --resume never (resume_from_checkpoint: false), or move them away"
)
"""What to do where no checkpoint of a folder is intact."""

_LAST_SECOND = 1e11  # of the year 5138: no clock says more, and no calendar takes much more


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from.

    Args:
        run: id of the run; "" where the checkpoint does not say.
        max_steps: steps that the run was to take.
        serial: counts the checkpoints that were written into the folder, whatever their run.
        written: seconds since 1970; for people, nothing is ordered by it.
    """

    run: str = ""
    max_steps: int = 0
    serial: int = 0
    written: float = 0.0


def new_run() -> str:
    """Returns an id for a run. No seed has a part in it."""
    return uuid.uuid4().hex[:16]


def next_origin(output_dir: Path, run: str, max_steps: int) -> dict[str, Any]:
    """Returns what the manifest of the next checkpoint in a folder says of its run."""
    serial = 1 + max((origin_of(folder).serial for _, folder in list_checkpoints(output_dir)), default=0)
    return asdict(Origin(run, max_steps, serial, round(time.time(), 3)))


def origin_of(folder: Path) -> Origin:
    """Returns what a checkpoint says of its run; an empty one where its manifest is not as it was written."""
    try:
        facts = read_manifest(folder).facts["run"]
        written = float(facts["written"])
        if not 0 <= written < _LAST_SECOND:
            written = 0.0
        return Origin(str(facts["run"]), int(facts["max_steps"]), int(facts["serial"]), written)
    except (CheckpointError, ValueError, LookupError, TypeError, ArithmeticError):
        return Origin()


def in_order(output_dir: Path) -> list[tuple[Path, Origin]]:
    """Returns the checkpoints of a folder: the run that wrote last comes last, and of a run the last one written."""
    found = [(step, folder, origin_of(folder)) for step, folder in list_checkpoints(output_dir)]
    last: dict[str, int] = {}
    for _, _, origin in found:
        last[origin.run] = max(origin.serial, last.get(origin.run, 0))
    found.sort(key=lambda item: (last[item[2].run], item[2].serial, item[0]))
    return [(folder, origin) for _, folder, origin in found]


def last_written(output_dir: Path) -> tuple[int, int]:
    """Returns number and step of the checkpoint that was written last into a folder; zeros where there is none.

    One that a dead process was about to replace counts, and stays where it is.
    """
    found = [(origin_of(folder).serial, step) for step, folder in list_checkpoints(output_dir)]
    found += [(origin_of(folder).serial, step_of(final)) for folder, final in half_replaced(output_dir)]
    return max(found, default=(0, 0))


def newest_verified(
    output_dir: Path, *, without: Container[str] = (), storage: Storage | None = None
) -> tuple[Path | None, list[CheckpointError]]:
    """Returns the newest intact checkpoint (None where there is none) and what was wrong with newer ones.

    Args:
        output_dir: where they lie.
        without: names of files that may be missing, see `verify`.
        storage: gives back its name to a checkpoint that was about to be replaced; the file system by default.
    """
    # Who only reads removes nothing: what looks dead may be alive on another machine that shares the folder.
    with contextlib.suppress(OSError):  # a folder that may only be read can be resumed from
        bring_back(storage or LocalStorage(), output_dir)
    newest, skipped = first_intact((folder for folder, _ in reversed(in_order(output_dir))), without=without)
    if newest is not None:
        skipped = _without_order(output_dir, newest) | skipped
    return newest, list(skipped.values())


def _without_order(output_dir: Path, chosen: Path) -> dict[Path, CheckpointError]:
    """Returns what is wrong with manifests of later steps: such a checkpoint counts as old, and was not looked at."""
    found = {}
    for step, folder in reversed(list_checkpoints(output_dir)):
        if step > step_of(chosen):
            try:
                read_manifest(folder)
            except CheckpointError as error:
                found[folder] = error
    return found


def passed_over(chosen: Path) -> str:
    """Returns, in words, the checkpoints beside `chosen` that someone might have expected instead; "" for none."""
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
            reason = "written earlier" if step > int(chosen.name.rpartition("-")[2]) else ""
        if reason:
            others.setdefault(reason, []).append(folder.name)
    return "; ".join(f"{', '.join(_first(names))} ({reason})" for reason, names in others.items())


def _first(names: list[str], limit: int = 4) -> list[str]:
    return names if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]
