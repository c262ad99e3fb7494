"""The largest batch that is found fits, and one more row does not, by traces of both."""

import dataclasses
import functools
import random

import pytest
import torch

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.deep_trace import DepthTraces, deep_traces
from forgather.ml.planner.row_limit import largest_rows
from forgather.ml.planner.row_line import peak_at
from forgather.ml.planner.window_shape import WindowShape, reshaped
from forgather.ml.types import Window
from tests.ml.planner.cells import Cell, make_trainer, pipeline

MOST = 200
QUICK = {"part1": [(Cell("single", layers=1), 1)]}
ACCUMULATED = {"fsdp": "full_shard", "gradient_accumulation_steps": 3}
FULL = {
    "part1": [
        (Cell("recomputed, bf16", args={"gradient_checkpointing": True, "bf16": True}), 5),
        (Cell("LoRA", adapter=True), 5),
    ],
    "part2": [
        (Cell("DDP", 2, "AccelTrainer", layers=7), 4),
        (Cell("FSDP2", 2, "AccelTrainer", {"fsdp": "full_shard"}), 4),
        (Cell("tensor", 2, "AccelTrainer", {"tensor_parallel_size": 2}), 4),
    ],
    "part3": [
        (Cell("FSDP2, accumulated", 2, "AccelTrainer", ACCUMULATED, layers=7), 3),
        (Cell("accumulated, deep", args={"gradient_accumulation_steps": 2}, layers=9), 4),
    ],
}
"""What is searched for in parts of some minutes: the run, and the number of limits."""


def parameters(parts, marks=()):
    return [pytest.param(*case, marks=marks, id=f"{part}-{case[0]}") for part, cases in parts.items() for case in cases]


def peak_of(cell, folder, rows):
    facts = ProcessFacts(rank=0, local_rank=0, world_size=cell.world_size, local_world_size=cell.world_size)
    make = functools.partial(make_trainer, cell, folder)
    found = deep_traces(make, facts, [WindowShape(rows=one) for one in rows])
    return [trace.peak[1].num_bytes + sum(trace.facts.untraced.values()) for trace in found]


@pytest.mark.parametrize(("cell", "limits"), [*parameters(QUICK), *parameters(FULL, pytest.mark.matrix)])
def test_the_answer_fits_and_one_more_row_does_not(cell, limits, tmp_path, record_property):
    smallest, largest = peak_of(cell, tmp_path, (1, MOST))
    numbers = random.Random(str(cell))
    drawn = [numbers.randint(smallest, largest - 1) for _ in range(limits)]
    sizes = {"world_size": cell.world_size, "local_world_size": cell.world_size}
    make = functools.partial(make_trainer, cell, tmp_path)
    answers = [largest_rows(make, **sizes, limit=limit, most=MOST) for limit in drawn]

    rows = sorted({found["size"] + more for found in answers for more in (0, 1)})
    peaks = dict(zip(rows, peak_of(cell, tmp_path, rows), strict=True))
    for limit, found in zip(drawn, answers, strict=True):
        fits, following = peaks[found["size"]], peaks[found["size"] + 1]
        assert fits <= limit < following
        assert (found["num_bytes"], found["next_bytes"], True) == (fits, following, found["is_exact"])
        assert len(found["traced"]) <= 3
    record_property("figure: limits", limits)
    record_property("figure: most traces", max(len(found["traced"]) for found in answers))


def test_the_stages_of_a_pipeline_are_made_for_one_number_of_rows(tmp_path):
    cell = pipeline("1F1B", "Schedule1F1B", layers=2)
    with pytest.raises(PlanError, match="pipeline") as caught:
        largest_rows(
            functools.partial(make_trainer, cell, tmp_path), world_size=2, local_world_size=2, limit=1, most=MOST
        )
    assert caught.value.code == "FG997"


def test_tensors_without_a_common_number_of_rows_are_refused():
    window = Window([{"input_ids": torch.ones(4, 2), "starts": torch.ones(3)}], 1.0, 8, 4)
    with pytest.raises(PlanError, match="no common number of rows: 3, 4"):
        reshaped(window, WindowShape(rows=2), 4)


def test_a_row_may_be_several_in_the_tensors_and_rows_that_are_joined_are_refused():
    pairs = Window([{"input_ids": torch.arange(8).view(4, 2)}], 1.0, 8, 2)
    (batch,) = reshaped(pairs, WindowShape(rows=3), 2).batches
    assert [0, 2, 4, 6, 0, 2] == batch["input_ids"][:, 0].tolist()
    joined = Window([{"input_ids": torch.ones(1, 8)}], 1.0, 8, 4)
    with pytest.raises(PlanError, match="a batch have 1 rows, which are made of 4 rows of the data"):
        reshaped(joined, WindowShape(rows=2), 4)


def test_a_save_may_need_more_than_the_step(tmp_path):
    cell = Cell("single", layers=1, args={"save_strategy": "steps", "save_steps": 1})
    make = functools.partial(make_trainer, cell, tmp_path)
    facts = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)
    (found,) = deep_traces(make, facts, [WindowShape(rows=1)])
    step = peak_at({1: DepthTraces(found, None)}, 1)

    gathering = dataclasses.replace(found, facts=dataclasses.replace(found.facts, gathered_bytes=step))

    assert 2 * step < peak_at({1: DepthTraces(gathering, None)}, 1) < 3 * step
