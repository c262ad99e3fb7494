"""A checkpoint, back in the parts of a run.

Takes the folder of a verified checkpoint and the parts of a run; gives what the run itself remembers. Keeps true: every
process does the same; what is missing and may not be is known before anything is changed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.files import DATA, METER, OPTIMIZER, PROGRESS, RNG, SCHEDULE
from forgather.ml.checkpoint.lineage import origin_of
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.reader import Saved
from forgather.ml.checkpoint.rng import try_rng
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer import resumed, saving
from forgather.ml.trainer.args import TrainingArguments
from forgather.ml.trainer.batches import TrainBatches
from forgather.ml.trainer.meanings import Meanings
from forgather.ml.trainer.meter import Meter
from forgather.ml.trainer.parts import numbers, read_parts, schedule_state, used, words
from forgather.ml.trainer.plausible import refuse_impossible
from forgather.ml.trainer.randomness import own_rng
from forgather.ml.trainer.skip_list import LeftOut


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run remembers of the checkpoint that it goes on from.

    Args:
        progress: how far the run was; of the step alone where the checkpoint does not hold more.
        rng: random states of this process; None where there are none for it.
        owed: what was due at the step, and not done.
        guard: what judgments of steps depend on.
        skips: the steps that were left out.
    """

    progress: TrainerState
    rng: dict[str, Any] | None
    owed: list[str]
    guard: dict[str, Any]
    skips: list[LeftOut]


def put_back(
    folder: Path,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    meter: Meter,
    *,
    meanings: Meanings | None = None,
) -> Loaded:
    """Puts a checkpoint back into the parts of a run.

    Args:
        folder: of a verified checkpoint.
        args: of the run.
        strategy: gets weights and optimizer state.
        schedule: of the learning rate.
        data: gets the position.
        meter: gets the mean loss.
        meanings: what the numbers of the run mean; None where the checkpoint is its own.

    Raises:
        CheckpointError: FG605 where it is one of another model, optimizer or schedule; FG608 where a part is missing
            that may not be; FG613 where tokens, labels or the model's settings are others; FG675 where one is not as a
            run writes it.
    """
    with collectives.together(lambda: Saved(folder)) as saved:
        return _put_back(folder, saved, args, strategy, schedule, data, meter, meanings)


def _put_back(
    folder: Path,
    saved: Saved,
    args: TrainingArguments,
    strategy: Strategy,
    schedule: Any,
    data: TrainBatches,
    meter: Meter,
    meanings: Meanings | None,
) -> Loaded:
    progress = collectives.together(lambda: saving.read_progress(folder))
    held = {name for name, part in ((PROGRESS, progress), (OPTIMIZER, saved.optimizer)) if part is not None}
    parts = collectives.together(lambda: read_parts(folder, held, frozenset(args.allow_missing or ())))
    step = read_manifest(folder).step
    present = {"groups": getattr(strategy.optimizer, "param_groups", ()), "schedule": schedule.state_dict()}
    collectives.together(
        lambda: refuse_impossible(folder, step, origin_of(folder), progress, saved.optimizer, parts, **present)
    )
    if meanings is not None:
        with used("meanings", folder):
            recorded = parts.get("meanings", {})
            collectives.by_writer(lambda: meanings.refuse_others(folder, recorded, args.allow_changed or ()))
    with used(SCHEDULE, folder):
        resumed.refuse_others(parts.get("classes", {}), strategy.optimizer, schedule)
    configured = resumed.settings(strategy.optimizer, schedule)
    if SCHEDULE not in parts:
        resumed.advance(schedule, step)
    with used(OPTIMIZER, folder):
        strategy.restore(saved)
        strategy.restore_optimizer(saved)
    if SCHEDULE in parts:
        with used(SCHEDULE, folder):
            resumed.restore_schedule(schedule, schedule_state(schedule, parts[SCHEDULE]))
    resumed.mention(configured, resumed.settings(strategy.optimizer, schedule))
    if DATA in parts:
        with used(DATA, folder):
            collectives.together(functools.partial(data.load_state_dict, parts[DATA]))
            numbers({"epoch": data.epoch, "row": data.row}, whole=True)
    if METER in parts:
        with used(METER, folder):
            meter.load_state_dict(dict(numbers(parts[METER])))
    with used(RNG, folder):
        rng = own_rng(parts[RNG], strategy.topology) if RNG in parts else None
        if rng is not None:
            try_rng(rng)
    with used("owed", folder):
        owed = words(parts.get("owed", []))
    # Earlier releases kept neither: their runs left no step out.
    with used("guard", folder):
        norms = parts.get("guard", {}).get("norms", [])
        guard = {"norms": list(numbers({str(place): norm for place, norm in enumerate(norms)}).values())}
    with used("skips", folder):
        skips = [LeftOut.of(facts) for facts in parts.get("skips", ())]
    return Loaded(progress or TrainerState(global_step=step), rng, owed, guard, skips)
