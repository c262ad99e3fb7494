"""A model in stages against the same model in one process: every schedule, in float64."""

import functools

import pytest

from forgather.ml.strategy.fsdp_config import Sharding
from tests.matrix import thinned
from tests.ml.distributed.cells import SCHEDULES as STAGES
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import (
    MODELS,
    SCHEDULES,
    differences,
    make_tied_llama,
    pipeline,
    recipe,
    single_run,
    train,
    weights_of,
    windows,
)

EXACT = 1e-10
ALL_MODELS = {**MODELS, "tied llama": make_tied_llama}


UPDATES = 2  # the second one is short, and has the state of an optimizer behind it


def recipe_of(model, layers):
    return recipe(functools.partial(ALL_MODELS[model], layers=layers))


@functools.cache
def reference(model, layers, accumulation, rows):
    return single_run(recipe_of(model, layers), windows(UPDATES, accumulation, rows, packed=True, tail=rows - 3))


def _trains(model, layers, accumulation, rows, world, data, settings):
    strategy = pipeline(recipe_of(model, layers), world=world, data=data, rows=rows // data, **settings)
    found = train(
        strategy,
        windows(UPDATES, accumulation, rows, packed=True, tail=rows - 3),
        dp_rank=strategy.topology.dp_rank,
        dp_size=strategy.topology.dp_size,
    )
    return (*found, weights_of(strategy))


def assert_equal_to_one_process(model, accumulation, rows, world, data=1, **settings):
    ranks = world // data // settings.get("tensor", 1)
    layers = max(4, ranks * STAGES[settings["schedule_class"]])
    want = reference(model, layers, accumulation, rows)
    found = run_ranks(world, _trains, model, layers, accumulation, rows, world, data, settings)
    assert len({tuple(losses) for losses, _, _ in found}) == 1
    assert len({tuple(norms) for _, norms, _ in found}) == 1
    off = differences(want, found[0])
    assert all(value <= EXACT for value in off.values()), off


# The whole grid (both models, both accumulations, three precisions, FSDP2) is the matrix of `make test-distributed`.


# Cells of the suite train each schedule in two ranks: here are products of strategies.
V = "ScheduleZBVZeroBubble"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schedule", "model", "accumulation", "world"),
    [(schedule, *case) for schedule in SCHEDULES for case in (("llama", 3, 2), ("gpt2", 1, 4))],
)
def test_every_schedule_trains_as_one_process_does(schedule, model, accumulation, world):
    assert_equal_to_one_process(model, accumulation, 8, world, schedule_class=schedule, pipeline_chunks=8)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_replicas_of_two_ranks_train_as_one_process_does(schedule):
    assert_equal_to_one_process("gpt2", 3, 8, 4, data=2, schedule_class=schedule, pipeline_chunks=4)


@pytest.mark.parametrize(
    ("schedule", "accumulation"),
    thinned([*((schedule, 3) for schedule in SCHEDULES), (V, 1)], lambda schedule, accumulation: accumulation == 1),
)
def test_weights_sharded_over_replicas_train_as_one_process_does(schedule, accumulation):
    settings = {"schedule_class": schedule, "pipeline_chunks": 4, "sharding": Sharding()}
    assert_equal_to_one_process("gpt2", accumulation, 8, 4, data=2, **settings)


@pytest.mark.parametrize(
    ("schedule", "accumulation"),
    thinned([("Schedule1F1B", 1), ("Schedule1F1B", 3), (V, 3)], lambda schedule, accumulation: accumulation == 1),
)
def test_sliced_layers_train_as_one_process_does(schedule, accumulation):
    settings = {"schedule_class": schedule, "pipeline_chunks": 4, "tensor": 2, "tp_plan": "auto"}
    assert_equal_to_one_process("tied llama", accumulation, 8, 4, **settings)


@pytest.mark.matrix
def test_stages_replicas_and_slices_together_train_as_one_process_does():
    settings = {"schedule_class": "ScheduleInterleavedZeroBubble", "pipeline_chunks": 4, "tensor": 2, "tp_plan": "auto"}
    assert_equal_to_one_process("tied llama", 1, 8, 8, data=2, sharding=Sharding(), **settings)
