"""Which micro-batches of a pipeline's runs have a mask of attention: these take another path through the model.

Takes a trainer with the data of a run; gives a flag for each micro-batch of any division of an update.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from forgather.ml.planner.planned_batches import planned_batches
from forgather.ml.planner.window_shape import WindowShape


def masked_parts(trainer: Any, rows: int, parts: int, runs: int) -> tuple[tuple[bool, ...], ...]:
    """Returns for each run of the schedule, and for each of its micro-batches, whether its attention is masked.

    Padding masks attention, and so do several documents in a row: a micro-batch without them takes another path.

    Args:
        trainer: a trainer with the data of the run.
        rows: the rows of a micro-batch.
        parts: the number of micro-batches of a run of the schedule.
        runs: the number of runs of the schedule, 1 or 2.
    """
    sizes = {"per_device_train_batch_size": rows * parts, "gradient_accumulation_steps": runs}
    other = copy.copy(trainer)
    # This schedule takes any number of micro-batches.
    schedule = {"schedule_class": "ScheduleGPipe", "stages_per_rank": 1, "split_spec": None, "pipeline_chunks": parts}
    other.args = dataclasses.replace(trainer.args, **sizes, **schedule)
    batches = planned_batches(other).window(WindowShape()).batches
    return tuple(_masked_parts(batch, rows, parts) for batch in batches)


def _masked_parts(batch: Any, rows: int, parts: int) -> tuple[bool, ...]:
    found = [False] * parts
    for name, item in dict(batch).items() if isinstance(batch, Mapping) else ():
        if isinstance(item, torch.Tensor) and item.dim() == 2 and len(item) == rows * parts:
            for index, part in enumerate(torch.split(item, rows)):
                is_mask = name.endswith("attention_mask") and not bool(part.all())
                found[index] |= is_mask or (name == "position_ids" and bool(part.diff().ne(1).any()))
    return tuple(found)
