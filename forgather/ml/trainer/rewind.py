"""The steps that a run left out, and their rows.

Takes bad steps with the rows that they were computed from; tells whether rows are to be passed over. Keeps true: rows
are named by epoch and number, which no number of processes and no batch size changes; the list lies in every
checkpoint of the run.
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
    """Rows of one epoch that follow one another, in the order in which the epoch reads them.

    Args:
        epoch: of the training data.
        first: number of the first row.
        end: number of the row after the last one.
    """

    epoch: int
    first: int
    end: int

    def meets(self, other: RowRange) -> bool:
        """Tells whether there is a row in both."""
        return self.epoch == other.epoch and self.first < other.end and other.first < self.end


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A step that was left out.

    Args:
        step: its number.
        rows: what it was computed from.
        reason: what was wrong with it.
    """

    step: int
    rows: RowRange
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {"step": self.step, **asdict(self.rows), "reason": self.reason}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> LeftOut:
        """Returns the step that `to_dict` told."""
        rows = RowRange(int(facts["epoch"]), int(facts["first"]), int(facts["end"]))
        return cls(int(facts["step"]), rows, str(facts["reason"]))


class SkipList:
    """The steps that a run left out.

    Args:
        most: how many steps may be left out among `among`.
        among: steps in a row.

    Example:
        >>> skips = SkipList(most=10, among=128)
        >>> skips.add(3, RowRange(0, 8, 12), "the loss is nan")
        >>> skips.covers(RowRange(0, 11, 15)), skips.covers(RowRange(1, 8, 12))
        (True, False)
    """

    def __init__(self, *, most: int, among: int) -> None:
        self.most = most
        self.among = among
        self.steps: list[LeftOut] = []

    def add(self, step: int, rows: RowRange, reason: str) -> None:
        """Remembers a step that is left out, with its rows and what is wrong with it.

        Raises:
            TrainingError: FG651 where there are too many of them.
        """
        _log.warning("step %d is left out: %s", step, reason)
        self.steps.append(LeftOut(step, rows, reason))
        recent = [one for one in self.steps if one.step > step - self.among]
        if len(recent) > self.most:
            raise TrainingError(
                f"{len(recent)} bad steps among {self.among}, and max_bad_steps is {self.most}; of step {step}, "
                f"{reason}",
                code="FG651",
                hint="lower learning_rate, lengthen warmup_steps, or look at the rows of these steps; the checkpoint "
                "before the first of them is sound",
            )

    def covers(self, rows: RowRange) -> bool:
        """Tells whether one of the rows belongs to a step that was left out."""
        return any(one.rows.meets(rows) for one in self.steps)

    def merge(self, others: Iterable[LeftOut]) -> None:
        """Adds those that are not there yet."""
        known = {one.rows for one in self.steps}
        self.steps += [one for one in others if one.rows not in known]

    def state(self) -> list[dict[str, Any]]:
        """Returns the list as plain data."""
        return [one.to_dict() for one in self.steps]


T = TypeVar("T")

SKIPPED = "skipped_steps.json"


class Renewable(Generic[T]):
    """Items of a source that may be read anew while somebody iterates over them.

    Args:
        read: begins to read, from whatever position is the present one.
    """

    def __init__(self, read: Callable[[], Iterator[T]]) -> None:
        self._read = read
        self._is_renewed = False

    def renew(self) -> None:
        """Has the next item come from reading anew."""
        self._is_renewed = True

    def __iter__(self) -> Iterator[T]:
        self._is_renewed = True
        while self._is_renewed:
            self._is_renewed = False
            for item in self._read():
                yield item
                if self._is_renewed:
                    break


class RewindTarget:
    """The checkpoints that the present state of a run comes from. Every process calls each method.

    Args:
        output_dir: of the run.
        storage: writes the list of steps that were left out.
    """

    def __init__(self, output_dir: Path, storage: Storage) -> None:
        self.output_dir = output_dir
        self.storage = storage
        self._behind: list[Path] = []

    def skipped_before(self, folder: Path, run: str) -> list[LeftOut]:
        """Returns the steps that a run left out beside a checkpoint that it is resumed from.

        Raises:
            CheckpointError: FG653 for a list that cannot be read.
        """
        self._behind = [folder]
        places = dict.fromkeys((folder.parent, self.output_dir))
        return collectives.run_on_main(functools.partial(read_skipped, places, run))

    def passed(self, folder: Path) -> None:
        """Remembers a checkpoint that was written."""
        self._behind = [*(earlier for earlier in self._behind if earlier != folder), folder]

    def take(self, bad: int, skips: SkipList, run: str) -> Path:
        """Returns the newest intact checkpoint, after the steps that are left out were written beside.

        Args:
            bad: the step to go back from.
            skips: the steps that are left out.
            run: id of the run.

        Raises:
            TrainingError: FG652 where there is no intact one.
            CheckpointError: FG609 where the disk refuses.
        """

        def act() -> int:
            place = newest_sound(self._behind, bad)
            write_skipped(self.storage, self.output_dir, run, skips)
            return place

        del self._behind[collectives.run_on_main(act) + 1 :]
        return self._behind[-1]


def newest_sound(behind: Sequence[Path], step: int) -> int:
    """Returns the place of the newest intact checkpoint.

    Args:
        behind: checkpoints that the present state comes from, oldest first; some may have been removed since.
        step: the bad one, named in the message.

    Raises:
        TrainingError: FG652 where there is none.
    """
    newest, skipped = first_intact(folder for folder in reversed(behind) if folder.is_dir())
    for error in skipped.values():
        _log.warning("skipped a checkpoint: %s", error.message)
    if newest is not None:
        return behind.index(newest)
    raise TrainingError(
        f"step {step} is bad, and there is no intact checkpoint of this run to go back to",
        code="FG652",
        hint="lower save_steps, so that one is written earlier, or set bad_step_policy: skip",
    )


def write_skipped(storage: Storage, output_dir: Path, run: str, skips: SkipList) -> None:
    """Writes the steps that a run left out beside its checkpoints; the file is whole or as it was before.

    Raises:
        CheckpointError: FG609 where the disk refuses.
    """
    beside = output_dir / f".{SKIPPED}"  # one run at a time writes into the folder, and what is left is written over
    try:
        make_folders(storage, output_dir)
        write_file(storage, beside, [as_json({"run": run, "steps": skips.state()})])
        storage.rename(beside, output_dir / SKIPPED)
        storage.sync_folder(output_dir)
    except OSError as error:
        raise CheckpointError(
            f"the steps that are left out could not be written to {str(output_dir / SKIPPED)!r}: "
            f"{error.strerror or error}",
            code="FG609",
            hint="free space or change output_dir; earlier checkpoints are untouched",
        ) from error


def read_skipped(folders: Iterable[Path], run: str) -> list[LeftOut]:
    """Returns the steps that a run left out, as files beside checkpoints tell; none where another run wrote them.

    Raises:
        CheckpointError: FG653 for a file that is none of ours, or damaged.
    """
    found: dict[LeftOut, None] = {}
    for folder in folders:
        file = folder / SKIPPED
        try:
            if file.exists() and not file.is_file():
                raise OSError("it is no regular file")  # the reading of a pipe would not end
            facts = json.loads(file.read_text(encoding="utf-8"))
            if facts["run"] == run:
                found |= dict.fromkeys(LeftOut.of(one) for one in facts["steps"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(
                f"the list of steps that were left out, {str(file)!r}, cannot be read: {type(error).__name__}: {error}",
                code="FG653",
                hint="remove it to train on their rows again, or bring it back",
            ) from None
    return list(found)
