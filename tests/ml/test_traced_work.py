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


def test_a_schedule_of_accumulation_is_planned_with_its_mean_work_and_its_largest_step():
    settings = {"num_train_epochs": 3, "max_steps": -1}
    plan, once = work_of("ddp.yaml", **settings)
    changes = [(f"trainer_args.{name}", str(value)) for name, value in settings.items()]
    for schedule in ("{0: 1, 2: 4}", "{steps: {0: 1, 3: 4}}"):
        changes += [("trainer_args.accumulate_grad_batches", schedule)]
        project = Project("ddp.yaml", "projects/parallel", overrides=[*changes[:2], changes[-1]])
        scheduled_plan, scheduled = traced_plan(project, gpus=2, nodes=1)
        # The same rows in fewer steps.
        rows = scheduled.rows_per_update * scheduled.num_updates
        assert once.rows_per_update * once.num_updates == pytest.approx(rows)
        assert once.num_updates > scheduled.num_updates
        per_row = scheduled.model_flops / scheduled.rows_per_update
        assert once.model_flops / once.rows_per_update == pytest.approx(per_row, rel=1e-9)
        assert 4 * plan["rows_per_update"] == scheduled_plan["rows_per_update"]
        assert any("mean step" in note for note in scheduled_plan["notes"])
        largest, _ = work_of("ddp.yaml", **settings, gradient_accumulation_steps=4)
        peaks = [found["ranks"][0]["phases"] for found in (plan, scheduled_plan, largest)]
        assert peaks[1] == peaks[2] != peaks[0]


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
