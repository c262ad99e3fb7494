"""Plans of pipelines that are drawn from traces of two ranks equal plans of their own, traced at their size."""

import functools
from dataclasses import replace

import pytest

from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.pipeline_plans import (
    IrregularPassError,
    PipelinePlans,
    PipelineSizes,
    family_settings,
    trace_family,
)
from forgather.ml.planner.pipeline_step import schedule_seconds
from forgather.planner.efficiency import Efficiency
from forgather.planner.hardware import hardware
from forgather.planner.step_time import step_time
from tests.ml.planner.cells import Cell, make_trainer

DEVICE = "cuda"
MODEL = {"layers": 12, "sizes": {"hidden_size": 256, "intermediate_size": 640}}


def sizes(schedule, ranks, per_rank, parts, cuts, *, runs=1, replicas=1):
    return PipelineSizes(
        schedule=f"Schedule{schedule}",
        ranks=ranks,
        stages_per_rank=per_rank,
        replicas=replicas,
        rows=1,
        parts=parts,
        runs=runs,
        cuts=cuts,
    )


CELLS = [
    (False, sizes("1F1B", 2, 1, 5, (5,))),
    (False, sizes("ZBVZeroBubble", 2, 2, 4, (3, 6, 9))),
    (True, sizes("ZBVZeroBubble", 2, 2, 4, (3, 6, 9))),
    (False, sizes("1F1B", 4, 1, 8, (3, 6, 9))),
    (False, sizes("1F1B", 4, 1, 4, (2, 6, 10), runs=3)),
    (False, sizes("1F1B", 2, 1, 4, (6,), runs=2, replicas=2)),
    (False, sizes("Interleaved1F1B", 2, 2, 6, (2, 6, 9))),
    (True, sizes("Interleaved1F1B", 3, 2, 6, (2, 4, 6, 8, 10))),
    (False, sizes("InterleavedZeroBubble", 2, 2, 8, (3, 5, 8))),
    (False, sizes("InterleavedZeroBubble", 2, 2, 4, (2, 7, 9))),
    (True, sizes("InterleavedZeroBubble", 4, 2, 8, (2, 3, 5, 6, 8, 9, 10))),
    (False, sizes("ZBVZeroBubble", 4, 2, 8, (2, 4, 5, 7, 8, 9, 10))),
    (False, sizes("DualPipeV", 2, 2, 6, (3, 6, 9))),
    (True, sizes("DualPipeV", 4, 2, 16, (2, 4, 5, 7, 8, 9, 10))),
]


def trainer_of(settings, recomputes, tmp_path):
    args = {"bf16": True, "gradient_checkpointing": recomputes, "optim": "adamw_torch", **settings}
    return functools.partial(make_trainer, Cell("", 2, "PipelineTrainer", args, **MODEL), tmp_path)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Returns a function that returns the plan and the work that are drawn; each family is traced once."""

    @functools.cache
    def family(recomputes, divides_backward):
        settings = family_settings(divides_backward=divides_backward)
        rows = {"per_device_train_batch_size": settings["pipeline_chunks"]}
        trainer = trainer_of({**settings, **rows}, recomputes, tmp_path_factory.mktemp("family"))
        return trace_family(trainer, device_type=DEVICE)

    def draw(recomputes, one):
        plans = PipelinePlans(functools.partial(family, recomputes), device_type=DEVICE)
        return plans.plan_of_sizes(one, local_world_size=8)

    return draw


def traced(recomputes, one, tmp_path):
    """Returns the plan and the work that `fgcli plan` makes."""
    settings = {
        "schedule_class": one.schedule,
        "pipeline_chunks": one.parts,
        "pipeline_parallel_size": one.ranks,
        "data_parallel_size": one.replicas,
        "stages_per_rank": one.stages_per_rank,
        "split_spec": {f"model.layers.{cut - 1}": "end" for cut in one.cuts},
        "per_device_train_batch_size": one.parts,
        "gradient_accumulation_steps": one.runs,
    }
    world = {"world_size": one.ranks * one.replicas, "local_world_size": 8, "device_type": DEVICE}
    return plan_run(trainer_of(settings, recomputes, tmp_path), **world)


def peaks(plan):
    return {
        tuple(rank["ranks"]): {phase["phase"]: phase["num_bytes"] for phase in rank["phases"]} for rank in plan["ranks"]
    }


def worst(plan):
    return max(max(phases.values()) for phases in peaks(plan).values())


def seconds(work):
    return step_time(work, hardware("h200"), Efficiency(), simulate=schedule_seconds).seconds


@pytest.mark.matrix
@pytest.mark.parametrize(("recomputes", "one"), CELLS, ids=str)
def test_a_drawn_pipeline_equals_its_own_plan(recomputes, one, drawn, tmp_path):
    plan, work = drawn(recomputes, one)
    own, own_work = traced(recomputes, one, tmp_path)
    assert peaks(own).keys() == peaks(plan).keys()
    assert worst(own) == pytest.approx(worst(plan), rel=0.001)
    for ranks, phases in peaks(own).items():
        assert phases["training step"] == pytest.approx(peaks(plan)[ranks]["training step"], rel=0.001), ranks
    assert own_work.executed_flops == pytest.approx(work.executed_flops, rel=1e-6)
    assert seconds(own_work).low == pytest.approx(seconds(work).low, rel=0.01)
    assert seconds(own_work).high == pytest.approx(seconds(work).high, rel=0.01)


def test_a_stage_at_an_end_with_one_block_does_not_follow_from_others(drawn):
    with pytest.raises(IrregularPassError):
        drawn(False, sizes("1F1B", 2, 1, 4, (1,)))


@pytest.mark.matrix
def test_another_number_of_micro_batches_is_told_apart(drawn, tmp_path):
    """A plan of one micro-batch in flight less is outside of the tolerance."""
    one = sizes("1F1B", 2, 1, 4, (6,))
    own, _ = traced(False, one, tmp_path)
    for other in (replace(one, parts=2), replace(one, cuts=(5,))):
        plan, _ = drawn(False, other)
        assert worst(own) != pytest.approx(worst(plan), rel=0.005)
