"""The work that a plan counts in a run: accumulation, sums of DDP, transfers of pipelines."""

import pytest

from forgather.launch.planning import traced_plan
from forgather.launch.time_planning import time_of
from forgather.planner.hardware import hardware
from forgather.project import Project

pytestmark = pytest.mark.matrix


def work_of(config, *, gpus=2, **settings):
    changes = [(f"trainer_args.{name}", str(value)) for name, value in settings.items()]
    return traced_plan(Project(config, "projects/parallel", overrides=changes), gpus=gpus, nodes=1)


def test_micro_batches_that_are_not_traced_count():
    _, once = work_of("ddp.yaml", gradient_accumulation_steps=1)
    plan, five = work_of("ddp.yaml", gradient_accumulation_steps=5)
    assert (5 * once.model_flops, 5 * once.rows_per_update) == (five.model_flops, five.rows_per_update)
    # DDP sums the gradients once a step, in fp32.
    for work in (once, five):
        sums = {m.num_bytes * count for m, count in work.ranks[0].messages.items() if "allreduce" in m.name}
        assert 4 * plan["parameters"] in sums


def test_recomputation_is_executed_and_no_work_of_the_model():
    plain, again = (
        traced_plan(Project("fsdp2.yaml", "projects/parallel", overrides=changes), gpus=2, nodes=1)[1]
        for changes in ((), (("+trainer_args.gradient_checkpointing", "true"),))
    )
    assert plain.model_flops == again.model_flops
    assert plain.executed_flops < again.executed_flops


def test_stages_wait_for_one_another():
    _, work = work_of("pipeline_1f1b.yaml")
    assert ("Schedule1F1B", [(0,), (1,)]) == (work.schedule, [one.stages for one in work.ranks])
    step = time_of(work, hardware("h200"))["step"]
    assert 0 < step["rows"]["bubble"]["low"] < step["seconds"]["low"] / 2
    assert {1} == {message.stride for message in work.ranks[0].messages}
