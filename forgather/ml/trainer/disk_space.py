"""Whether there is room for what a run will write, known before its first step.

Takes the size of a checkpoint, the steps at which they are written, and which stay; gives nothing, or an error that
says what would fit. Keeps true: what lies there already needs no further room; where nobody knows how much is free,
nothing is said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forgather.errors import CheckpointError
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.retention import Retention
from forgather.ml.number_format import size
from forgather.ml.trainer.arguments import TrainingArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a run will write.

    Args:
        checkpoint: bytes of one.
        model: bytes of the model alone, which is written at the end.
        steps: at which checkpoints are written.
        present: steps of those of the same run that lie there already, in the order of writing.
    """

    checkpoint: int
    model: int
    steps: Sequence[int]
    present: Sequence[int] = ()

    def at_once(self, retention: Retention) -> tuple[int, int]:
        """Returns how many further checkpoints there are at most at one time, and how many at the end."""
        if retention.last is None:  # nothing goes: a run of very many saves need not be gone through
            earlier = {*self.present, *self.steps[:-1]}
            return len(earlier) + 1 - len(self.present), len(earlier | {*self.steps[-1:]}) - len(self.present)
        lying = list(self.present)
        most = len(lying)
        for step in self.steps:
            # The new one is written beside all others, also where it takes the place of one.
            most = max(most, len(lying) + 1)
            lying = [other for other in lying if other != step] + [step]
            gone = set(retention.surplus(lying, self.steps[: retention.best]))
            lying = [other for other in lying if other not in gone]
        return max(most - len(self.present), 1), max(len(lying) - len(self.present), 0)

    def bytes(self, retention: Retention) -> int:
        """Returns how much has to be free."""
        most, last = self.at_once(retention)
        return max(most * self.checkpoint, last * self.checkpoint + self.model)


def refuse_too_much(need: Need, retention: Retention, folder: Path, free: int | None) -> None:
    """Raises where there is not enough room.

    Raises:
        CheckpointError: FG630.
    """
    needed = need.bytes(retention)
    if free is None or not need.steps or needed <= free:
        return
    raise CheckpointError(
        f"the run will need {size(needed)} in {str(folder)!r}, where {size(free)} are free: {_told(need, retention)}",
        code="FG630",
        hint=_what_fits(need, retention, free),
    ).about("args.output_dir")


def _told(need: Need, retention: Retention) -> str:
    """Returns what lies there when most does: checkpoints alone, or, at the end, fewer of them and the model."""
    most, last = need.at_once(retention)
    ends_with_most = need.bytes(retention) > most * need.checkpoint
    count = last if ends_with_most else most
    checkpoints = f"{count} checkpoint{'' if count == 1 else 's'} of {size(need.checkpoint)}"
    if ends_with_most:
        return f"{checkpoints}, and the model of {size(need.model)}" if count else f"the model of {size(need.model)}"
    return f"{checkpoints} at one time" if count > 1 else checkpoints


def _what_fits(need: Need, retention: Retention, free: int) -> str:
    limits = range(min(retention.last or len(need.steps), len(need.steps)) - 1, 0, -1)
    for last in limits if len(limits) < 100 else (16, 8, 4, 3, 2, 1):
        if need.bytes(dataclasses.replace(retention, last=last, every=None)) <= free:
            beside = ", without keep_every_n_steps" if retention.every else ""
            return f"save_total_limit: {last} would fit{beside}; or {_others(need, retention, free)}"
    alone = dataclasses.replace(need, checkpoint=need.model)
    if alone.bytes(dataclasses.replace(retention, last=1, every=None)) <= free:
        return f"save_only_model: true with save_total_limit: 1 would fit; or {_others(need, retention, free)}"
    return f'{_others(need, retention, free)}, or set save_strategy: "no"'


def _others(need: Need, retention: Retention, free: int) -> str:
    return f"free {size(need.bytes(retention) - free)} more, or give another output_dir"


def planned_steps(args: TrainingArguments, state: TrainerState, updates_per_epoch: int | None) -> list[int]:
    """Returns the steps at which checkpoints will be written for certain; some come by minutes, or by a metric."""
    first, last = state.global_step + 1, state.max_steps
    if args.save_strategy == "no" or first > last:
        return []
    every = math.inf
    if args.save_strategy == "steps":
        every = int(state.save_steps)
    elif args.save_strategy == "epoch" and updates_per_epoch:
        every = updates_per_epoch
    found = [] if every is math.inf else list(range(-(-first // int(every)) * int(every), last + 1, int(every)))
    return found if found[-1:] == [last] else [*found, last]
