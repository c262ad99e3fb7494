"""The number of micro-batches of each optimizer step, where it changes during a run.

The input is the training argument `accumulate_grad_batches` as the user wrote it; the output is an `Accumulation`, or
an `AccumulationFault` that says what was found and what to write. The number of a step follows from the number of its
epoch or of the step itself, so that a resumed run continues with the right one. All counts of steps are computed here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from forgather.value_text import shown

EPOCHS, STEPS = "epochs", "steps"
_EXAMPLE = "{0: 8, 5: 4}"


class AccumulationFault(ValueError):
    """A schedule of accumulation that cannot be used.

    Args:
        message: a description of what was found.
        hint: a description of what to write.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The number of micro-batches of each optimizer step.

    Args:
        entries: pairs of a number of micro-batches and the epoch or step from which on it applies, in ascending order.
            The first one applies from 0.
        unit: "epochs" or "steps"; both are counted from 0, as the steps that are done.

    Example:
        >>> halved = Accumulation(((0, 8), (5, 4)))
        >>> halved.at(epoch=4, step=90), halved.at(epoch=5, step=91), str(halved)
        (8, 4, '{0: 8, 5: 4}')
    """

    entries: tuple[tuple[int, int], ...]
    unit: str = EPOCHS

    @classmethod
    def constant(cls, micro_batches: int) -> Accumulation:
        """Returns an accumulation that does not change."""
        return cls(((0, micro_batches),))

    @property
    def changes(self) -> bool:
        """Whether the number of micro-batches of a step changes."""
        return len(self.entries) > 1

    @property
    def largest(self) -> int:
        """The largest number of micro-batches of a step."""
        return max(count for _, count in self.entries)

    @property
    def largest_from(self) -> tuple[int, int]:
        """An epoch, and a number of steps that are done, at which a step has the largest number of micro-batches."""
        start = next(start for start, count in self.entries if count == self.largest)
        return (start, 0) if self.unit == EPOCHS else (0, start)

    def at(self, *, epoch: int, step: int) -> int:
        """Returns the number of micro-batches of an optimizer step.

        Args:
            epoch: the number of the epoch, from 0.
            step: the number of optimizer steps that were done before.
        """
        if not self.changes:
            return self.entries[0][1]
        return self.entries[self._index(epoch if self.unit == EPOCHS else step)][1]

    def epoch_ends(self, batches: int) -> Iterator[int]:
        """Yields, for each epoch without end, the number of optimizer steps that are done at the end of the epoch.

        Args:
            batches: the number of micro-batches of an epoch, from 1.

        Example:
            >>> list(itertools.islice(Accumulation(((0, 4), (1, 2))).epoch_ends(9), 3))
            [3, 8, 13]
        """
        step = 0
        for epochs, steps in self._equal_epochs(batches):
            for _ in itertools.count() if epochs == math.inf else range(int(epochs)):
                step += steps
                yield step

    def num_steps(self, batches: int, epochs: float) -> int:
        """Returns the number of optimizer steps of a number of epochs. An incomplete epoch is counted.

        Args:
            batches: the number of micro-batches of an epoch, from 1.
            epochs: the number of epochs; may be a fraction.
        """
        total = 0
        for number, steps in self._equal_epochs(batches):
            if epochs <= number:
                return total + math.ceil(epochs * steps)
            total, epochs = total + int(number) * steps, epochs - number
        raise AssertionError("the last run of epochs has no end")

    def num_epochs(self, batches: int, steps: int) -> int:
        """Returns the number of epochs of a number of optimizer steps. An incomplete epoch is counted.

        Args:
            batches: the number of micro-batches of an epoch, from 1.
            steps: the number of optimizer steps.
        """
        epochs = 0
        for number, each in self._equal_epochs(batches):
            if steps <= number * each:
                return epochs + math.ceil(steps / each)
            epochs, steps = epochs + int(number), steps - int(number) * each
        raise AssertionError("the last run of epochs has no end")

    def num_micro_batches(self, steps: int, batches: int | None = None) -> int:
        """Returns the number of micro-batches of a number of optimizer steps.

        Args:
            steps: the number of optimizer steps.
            batches: the number of micro-batches of an epoch, from 1; None if the first epoch has no end.
        """
        total, epoch, done = 0, 0, 0
        for number, each in self._equal_epochs(batches) if batches is not None else ():
            whole = int(min(number, (steps - done) // each))
            total, epoch, done = total + whole * (batches or 0), epoch + whole, done + whole * each
            if whole < number:
                break
        if self.unit == EPOCHS:
            return total + (steps - done) * self.at(epoch=epoch, step=done)
        starts = [min(max(start, done), steps) for start, _ in self.entries]
        return total + sum(
            (end - start) * count
            for start, end, (_, count) in zip(starts, [*starts[1:], steps], self.entries, strict=True)
        )

    def __str__(self) -> str:
        written = "{" + ", ".join(f"{start}: {count}" for start, count in self.entries) + "}"
        return written if self.unit == EPOCHS else f"{{{self.unit}: {written}}}"

    def _index(self, number: int) -> int:
        return bisect.bisect(self.entries, number, key=itemgetter(0)) - 1

    def _equal_epochs(self, batches: int) -> Iterator[tuple[float, int]]:
        """Yields the number of epochs in a row that have the same number of steps, and this number; without end."""
        starts = [*(start for start, _ in self.entries[1:]), math.inf]
        if self.unit == EPOCHS:
            for (start, count), end in zip(self.entries, starts, strict=True):
                yield end - start, -(-batches // count)
            return
        step, place = 0, 0
        while True:
            steps = -(-batches // self.entries[place][1])
            epochs = (starts[place] - step) // steps if starts[place] < math.inf else math.inf
            if epochs == math.inf or epochs >= 1:
                yield epochs, steps
            if epochs == math.inf:
                return
            step += int(epochs) * steps
            if step < starts[place]:
                # The number changes within this epoch, once or more often.
                after = self._after(batches, step)
                yield 1, after - step
                step = after
            place = self._index(step)

    def _after(self, batches: int, step: int) -> int:
        """Returns the number of steps that are done after an epoch, from the number before it."""
        while True:
            place = self._index(step)
            count, needed = self.entries[place][1], -(-batches // self.entries[place][1])
            change = self.entries[place + 1][0] if place + 1 < len(self.entries) else math.inf
            if step + needed <= change:
                return step + needed
            batches -= int(change - step) * count
            step = int(change)


def read_accumulation(value: Any) -> Accumulation:
    """Returns the accumulation that a value of `accumulate_grad_batches` describes.

    Args:
        value: a mapping from the number of an epoch to a number of micro-batches; or a mapping with the only key
            `epochs` or `steps`, whose value is such a mapping from the number of an epoch or of a step.

    Raises:
        AccumulationFault: if the value has another form.

    Example:
        >>> str(read_accumulation({"steps": {0: 8, 1000: 4}}))
        '{steps: {0: 8, 1000: 4}}'
    """
    if isinstance(value, int) and not isinstance(value, bool):
        raise AccumulationFault(
            f"accumulate_grad_batches is {shown(value)}, a number that does not change",
            f"write gradient_accumulation_steps: {shown(value)}, or a schedule: accumulate_grad_batches: {_EXAMPLE}",
        )
    if not isinstance(value, Mapping) or not value:
        raise AccumulationFault(
            f"accumulate_grad_batches is {shown(value)}",
            f"write the epochs at which the number of micro-batches changes, as {_EXAMPLE}, or {{steps: {_EXAMPLE}}}",
        )
    unit, entries = EPOCHS, value
    words = [key for key in value if isinstance(key, str) and not key.strip().lstrip("-").isdigit()]
    if words:
        unit = words[0]
        if unit not in (EPOCHS, STEPS) or len(value) > 1:
            what = "has more than one unit" if len(value) > 1 else f"has the key {unit!r}"
            raise AccumulationFault(
                f"accumulate_grad_batches {what}: {shown(value)}",
                f"write either epochs, as {_EXAMPLE}, or steps, as {{steps: {_EXAMPLE}}}",
            )
        entries = value[unit]
        if not isinstance(entries, Mapping) or not entries:
            raise AccumulationFault(
                f"accumulate_grad_batches.{unit} is {entries!r:.80}", f"write a mapping, as {{{unit}: {_EXAMPLE}}}"
            )
    return Accumulation(tuple(_entries(entries, unit)), unit)


def _entries(entries: Mapping[Any, Any], unit: str) -> Iterator[tuple[int, int]]:
    one = unit.removesuffix("s")
    for start, count in entries.items():
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise AccumulationFault(
                f"accumulate_grad_batches has the {one} {start!r:.40}",
                f"write the number of the {one} from which on it applies, a whole number from 0, without quotes",
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise AccumulationFault(
                f"accumulate_grad_batches has {count!r:.40} micro-batches from {one} {start}",
                "write a whole number from 1",
            )
    starts = list(entries)
    ordered = Accumulation(tuple(sorted(entries.items())), unit)
    if starts != sorted(starts):
        raise AccumulationFault(
            f"the {unit} of accumulate_grad_batches are not in ascending order: {', '.join(map(str, starts))}",
            f"write {ordered}",
        )
    if starts[0] != 0:
        raise AccumulationFault(
            f"accumulate_grad_batches begins with {one} {starts[0]}, and says nothing about earlier ones",
            f"write {Accumulation(((0, 1), *ordered.entries), unit)} for no accumulation before {one} {starts[0]}",
        )
    yield from ordered.entries
