"""The list of skipped steps with their rows, and the search for the checkpoint to which a run is rewound.

A step is skipped if its loss or gradient norm is bad. `SkipList` contains the skipped steps and the rows from which
they were computed, and finds out whether a window (the micro-batches of one optimizer step) contains one of these rows.
A row is identified by the number of the epoch and the position in the epoch, which do not depend on the number of
processes or the batch size. Every checkpoint stores the list. `RewindTarget` finds the checkpoint.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.files import json_bytes
from forgather.ml.checkpoint.manifest import first_intact
from forgather.ml.checkpoint.storage import Storage, make_folders, write_file
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of consecutive rows of one epoch, in the order in which they are read.

    Args:
        epoch: the number of the epoch.
        first: the position of the first row in the epoch.
        end: the position after the last row.
    """

    epoch: int
    first: int
    end: int

    def overlaps(self, other: RowRange) -> bool:
        """Returns whether the two ranges have a row in common."""
        return self.epoch == other.epoch and self.first < other.end and other.first < self.end


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """An optimizer step that was skipped.

    Args:
        step: the number of the step.
        rows: the rows from which the step was computed.
        reason: a description of what was wrong with the step.
    """

    step: int
    rows: RowRange
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the step as data that can be stored as JSON."""
        return {"step": self.step, **asdict(self.rows), "reason": self.reason}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> SkippedStep:
        """Returns the skipped step that `to_dict` described."""
        rows = RowRange(int(facts["epoch"]), int(facts["first"]), int(facts["end"]))
        return cls(int(facts["step"]), rows, str(facts["reason"]))


class SkipList:
    """The steps that a run skipped.

    Args:
        most: the number of steps that may be skipped within `among` consecutive steps.
        among: the number of consecutive steps to which `most` applies.

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
        """Adds a skipped step, and logs a warning.

        Args:
            step: the number of the step.
            rows: the rows from which the step was computed.
            reason: a description of what was wrong with the step.

        Raises:
            TrainingError: FG651 if too many of the recent steps were skipped.
        """
        # A warning: without logging configuration Python shows warnings only, and skipped rows change the result.
        _log.warning("step %d is skipped: %s", step, reason)
        self.steps.append(SkippedStep(step, rows, reason))
        # By step number, not by time: after a rewind the same steps come again, and old ones must still count.
        recent = [one for one in self.steps if one.step > step - self.among]
        if len(recent) > self.most:
            raise TrainingError(
                f"{plural(len(recent), 'bad step')} within {self.among} steps, and max_bad_steps is {self.most}; at "
                f"step {step}, {reason}",
                code="FG651",
                hint="lower learning_rate, lengthen warmup_steps, or look at the rows of these steps; the checkpoint "
                "before the first of them is not affected",
            )

    def covers(self, rows: RowRange) -> bool:
        """Returns whether a range of rows contains a row of a skipped step."""
        return any(one.rows.overlaps(rows) for one in self.steps)

    def merge(self, others: Iterable[SkippedStep]) -> None:
        """Adds the given steps, except for those whose range of rows is already in the list."""
        # The list in a checkpoint and the file next to the checkpoints overlap.
        known = {one.rows for one in self.steps}
        self.steps += [one for one in others if one.rows not in known]

    def state(self) -> list[dict[str, Any]]:
        """Returns the list as data that can be stored as JSON."""
        return [one.to_dict() for one in self.steps]


T = TypeVar("T")

SKIPPED = "skipped_steps.json"


class Renewable(Generic[T]):
    """An iterable whose underlying iterator can be replaced during an iteration.

    Args:
        read: a function that returns an iterator from the current position on.
    """

    def __init__(self, read: Callable[[], Iterator[T]]) -> None:
        self._read = read
        self._is_renewed = False

    def renew(self) -> None:
        """Requests that the next item is taken from a new iterator."""
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
    """Finds the checkpoint to which a run is rewound: the newest intact one from which the current state descends.

    Every process must call each method.

    Args:
        output_dir: the output folder of the run.
        storage: the object through which the list of skipped steps is written.
    """

    def __init__(self, output_dir: Path, storage: Storage) -> None:
        self.output_dir = output_dir
        self.storage = storage
        self._ancestors: list[Path] = []

    def skipped_before(self, folder: Path, run: str) -> list[SkippedStep]:
        """Records the checkpoint from which a run resumes, and returns the steps that the run skipped.

        The skipped steps are read from the lists next to the checkpoint and in the output folder. Collective: every
        process must call it.

        Args:
            folder: the folder of the checkpoint.
            run: the id of the run.

        Raises:
            CheckpointError: FG653 if a list cannot be read.
        """
        # Checkpoints after this one belong to the continuation that the resume gave up.
        self._ancestors = [folder]
        places = dict.fromkeys((folder.parent, self.output_dir))
        return collectives.run_on_main(functools.partial(read_skipped, places, run))

    def add(self, folder: Path) -> None:
        """Records that a checkpoint of the current state was written."""
        self._ancestors = [*(earlier for earlier in self._ancestors if earlier != folder), folder]

    def take(self, bad: int, skips: SkipList, run: str) -> Path:
        """Writes the list of skipped steps to the output folder, and returns the newest intact checkpoint.

        Collective: every process must call it.

        Args:
            bad: the number of the bad step, which the message names.
            skips: the list of skipped steps.
            run: the id of the run.

        Raises:
            TrainingError: FG652 if there is no intact checkpoint.
            CheckpointError: FG609 if the list cannot be written.
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
        ancestors: the folders of the checkpoints from which the current state descends, oldest first. Some may have
            been removed.
        step: the number of the bad step, which the message names.

    Raises:
        TrainingError: FG652 if there is no intact checkpoint.
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
    """Writes the list of skipped steps to a file next to the checkpoints.

    The file is replaced atomically: after a crash it contains either the old list or the new one.

    Args:
        storage: the object through which files are written and removed.
        output_dir: the output folder of the run.
        run: the id of the run.
        skips: the list of skipped steps.

    Raises:
        CheckpointError: FG609 if the file cannot be written.
    """
    unfinished = output_dir / f".{SKIPPED}"  # a fixed name: one run at a time writes here, and leftovers are replaced
    # Through the storage and by a rename, like a checkpoint: a crash leaves the old list or the new one.
    try:
        make_folders(storage, output_dir)
        write_file(storage, unfinished, [json_bytes({"run": run, "steps": skips.state()})])
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
    """Returns the steps that a run skipped, read from the files next to checkpoints; ignores the files of other runs.

    Args:
        folders: the folders that may contain such a file.
        run: the id of the run.

    Raises:
        CheckpointError: FG653 if a file cannot be read or does not have the form in which a run writes it.
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
