"""Skipped steps and their rows, and the way back to an earlier checkpoint of the same run.

`SkipList` holds the steps that were skipped, with the rows that they were computed from, and tells whether a window
contains one of these rows. Rows are named by epoch and number, which do not depend on the number of processes or the
batch size. Every checkpoint of the run stores the list. `RewindTarget` finds the checkpoint that a run goes back to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.files import as_json
from forgather.ml.checkpoint.manifest import first_intact
from forgather.ml.checkpoint.storage import Storage, make_folders, write_file
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one epoch, in the order in which the epoch reads them.

    Args:
        epoch: of the training data.
        first: number of the first row.
        end: number after the last row.
    """

    epoch: int
    first: int
    end: int

    def overlaps(self, other: RowRange) -> bool:
        """Returns whether the two ranges have a row in common."""
        return self.epoch == other.epoch and self.first < other.end and other.first < self.end


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A skipped step.

    Args:
        step: its number.
        rows: that it was computed from.
        reason: what was wrong with it.
    """

    step: int
    rows: RowRange
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as plain data."""
        return {"step": self.step, **asdict(self.rows), "reason": self.reason}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> SkippedStep:
        """Returns the step that `to_dict` gave."""
        rows = RowRange(int(facts["epoch"]), int(facts["first"]), int(facts["end"]))
        return cls(int(facts["step"]), rows, str(facts["reason"]))


class SkipList:
    """The steps that a run skipped.

    Args:
        most: number of steps that may be skipped within `among` steps.
        among: length of the window, in steps.

    Example:
        >>> skips = SkipList(most=10, among=128)
        >>> skips.add(3, RowRange(0, 8, 12), "the loss is nan")
        >>> skips.covers(RowRange(0, 11, 15)), skips.covers(RowRange(1, 8, 12))
        (True, False)
    """

    def __init__(self, *, most: int, among: int) -> None:
        self.most = most
        self.among = among
        self.steps: list[SkippedStep] = []

    def add(self, step: int, rows: RowRange, reason: str) -> None:
        """Adds a skipped step.

        Args:
            step: its number.
            rows: that it was computed from.
            reason: what was wrong with it.

        Raises:
            TrainingError: FG651 if too many steps were skipped.
        """
        # A warning: without logging configuration Python shows warnings only, and skipped rows change the result.
        _log.warning("step %d is skipped: %s", step, reason)
        self.steps.append(SkippedStep(step, rows, reason))
        # By step number, not by time: after a rewind the same steps come again, and old ones must still count.
        recent = [one for one in self.steps if one.step > step - self.among]
        if len(recent) > self.most:
            raise TrainingError(
                f"{len(recent)} bad steps within {self.among} steps, and max_bad_steps is {self.most}; at step "
                f"{step}, {reason}",
                code="FG651",
                hint="lower learning_rate, lengthen warmup_steps, or look at the rows of these steps; the checkpoint "
                "before the first of them is not affected",
            )

    def covers(self, rows: RowRange) -> bool:
        """Returns whether one of the rows belongs to a skipped step."""
        return any(one.rows.overlaps(rows) for one in self.steps)

    def merge(self, others: Iterable[SkippedStep]) -> None:
        """Adds the steps whose rows are not in the list yet."""
        # The list in a checkpoint and the file next to the checkpoints overlap.
        known = {one.rows for one in self.steps}
        self.steps += [one for one in others if one.rows not in known]

    def state(self) -> list[dict[str, Any]]:
        """Returns the list as plain data."""
        return [one.to_dict() for one in self.steps]


T = TypeVar("T")

SKIPPED = "skipped_steps.json"


class Renewable(Generic[T]):
    """An iterable whose source can be replaced during an iteration.

    Args:
        read: opens the source at its current position.
    """

    def __init__(self, read: Callable[[], Iterator[T]]) -> None:
        self._read = read
        self._is_renewed = False

    def renew(self) -> None:
        """Requests that the next item comes from a newly opened source."""
        self._is_renewed = True

    def __iter__(self) -> Iterator[T]:
        # True once, so that the source is opened; then only `renew`, called while an item is out, opens it again.
        self._is_renewed = True
        while self._is_renewed:
            self._is_renewed = False
            for item in self._read():
                yield item
                if self._is_renewed:
                    break


class RewindTarget:
    """The checkpoints that the current state of a run descends from. Collective: every process calls each method.

    Args:
        output_dir: of the run.
        storage: writes the list of skipped steps.
    """

    def __init__(self, output_dir: Path, storage: Storage) -> None:
        self.output_dir = output_dir
        self.storage = storage
        self._ancestors: list[Path] = []

    def skipped_before(self, folder: Path, run: str) -> list[SkippedStep]:
        """Returns the steps that are listed as skipped next to the checkpoint that a run resumes from.

        Args:
            folder: of the checkpoint.
            run: id of the run.

        Raises:
            CheckpointError: FG653 for a list that cannot be read.
        """
        # Checkpoints after this one belong to the continuation that the resume gave up.
        self._ancestors = [folder]
        places = dict.fromkeys((folder.parent, self.output_dir))
        return collectives.run_on_main(functools.partial(read_skipped, places, run))

    def add(self, folder: Path) -> None:
        """Adds a checkpoint that was written."""
        self._ancestors = [*(earlier for earlier in self._ancestors if earlier != folder), folder]

    def take(self, bad: int, skips: SkipList, run: str) -> Path:
        """Returns the newest intact checkpoint; first writes the list of skipped steps to the output folder.

        Args:
            bad: the step to go back from.
            skips: the skipped steps.
            run: id of the run.

        Raises:
            TrainingError: FG652 if there is no intact one.
            CheckpointError: FG609 where the disk refuses.
        """

        def act() -> int:
            place = newest_intact_index(self._ancestors, bad)
            # Written before the rewind: if the process stops now, the resumed run must not train on the same rows
            # again.
            write_skipped(self.storage, self.output_dir, run, skips)
            return place

        # Later checkpoints hold a state that this run no longer descends from.
        del self._ancestors[collectives.run_on_main(act) + 1 :]
        return self._ancestors[-1]


def newest_intact_index(ancestors: Sequence[Path], step: int) -> int:
    """Returns the index of the newest intact checkpoint.

    Args:
        ancestors: checkpoints that the current state descends from, oldest first; some may have been removed.
        step: the bad step, named in the message.

    Raises:
        TrainingError: FG652 if there is none.
    """
    newest, skipped = first_intact(folder for folder in reversed(ancestors) if folder.is_dir())
    for error in skipped.values():
        _log.warning("skipped a checkpoint: %s", error.message)
    if newest is not None:
        return ancestors.index(newest)
    raise TrainingError(
        f"step {step} is bad, and there is no intact checkpoint of this run to go back to",
        code="FG652",
        hint="lower save_steps, so that one is written earlier, or set bad_step_policy: skip",
    )


def write_skipped(storage: Storage, output_dir: Path, run: str, skips: SkipList) -> None:
    """Writes the skipped steps next to the checkpoints; the file is complete or unchanged.

    Args:
        storage: does the file operations.
        output_dir: of the run.
        run: id of the run.
        skips: the skipped steps.

    Raises:
        CheckpointError: FG609 where the disk refuses.
    """
    unfinished = output_dir / f".{SKIPPED}"  # a fixed name: one run at a time writes here, and leftovers are replaced
    # Through the storage and by a rename, like a checkpoint: a crash leaves the old list or the new one.
    try:
        make_folders(storage, output_dir)
        write_file(storage, unfinished, [as_json({"run": run, "steps": skips.state()})])
        storage.rename(unfinished, output_dir / SKIPPED)
        storage.sync_folder(output_dir)
    except OSError as error:
        raise CheckpointError(
            f"the list of skipped steps could not be written to {str(output_dir / SKIPPED)!r}: "
            f"{error.strerror or error}",
            code="FG609",
            hint="free space or change output_dir; earlier checkpoints are untouched",
        ) from error


def read_skipped(folders: Iterable[Path], run: str) -> list[SkippedStep]:
    """Returns the skipped steps of a run from the files next to its checkpoints; empty if another run wrote them.

    Args:
        folders: that may hold a file.
        run: id of the run.

    Raises:
        CheckpointError: FG653 for a file of another form, or a damaged one.
    """
    found: dict[SkippedStep, None] = {}
    for folder in folders:
        file = folder / SKIPPED
        try:
            if file.exists() and not file.is_file():
                raise OSError("it is not a regular file")  # reading a pipe would block
            facts = json.loads(file.read_text(encoding="utf-8"))
            # Another run in the same folder: its row numbers belong to another order of the data.
            if facts["run"] == run:
                found |= dict.fromkeys(SkippedStep.from_dict(one) for one in facts["steps"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(
                f"the list of skipped steps {str(file)!r} cannot be read: {type(error).__name__}: {error}",
                code="FG653",
                hint="remove it to train on their rows again, or restore it",
            ) from None
    return list(found)
