"""The steps that a run left out, and their rows.

Takes bad steps with the rows that they were computed from; tells whether rows are to be passed over. Keeps true: rows
are named by epoch and number, which no number of processes and no batch size changes; the list lies in every
checkpoint of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from forgather.errors import TrainingError
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
