"""Plans of several batches from one pair of traces equal those that are traced at their own size."""

import functools
from dataclasses import replace

import pytest
import torch

from forgather.ml.planner.batch_plans import full_plans, plan_batches, plans_by_offload, plans_by_recomputation
from forgather.ml.planner.extrapolation import DEEPER
from forgather.ml.planner.memory import plan_run
from forgather.planner.efficiency import Efficiency
from forgather.planner.hardware import hardware
from forgather.planner.step_time import step_time
from tests.ml.planner.cells import Cell, make_trainer
from tests.ml.planner.test_masked_rows import PADDED
from tests.ml.planner.test_masked_rows import model as shared_heads
from tests.ml.planner.test_planned_batches import trainer

QUICK = [
    (Cell("single, recomputed", args={"gradient_checkpointing": True}, layers=2), [(1, 8), (2, 4), (4, 2), (8, 1)])
]
FULL = [
    (Cell("single, deep", layers=7), [(3, 2), (6, 1)]),
    (Cell("DDP", 2, "AccelTrainer", layers=7), [(1, 12), (3, 4), (6, 2), (12, 1)]),
    (Cell("FSDP2", 2, "AccelTrainer", {"fsdp": "full_shard"}, layers=7), [(1, 12), (4, 3), (12, 1)]),
    (Cell("FSDP2, bf16", 2, "AccelTrainer", {"fsdp": "shard_grad_op", "bf16": True}, layers=7), [(1, 12), (4, 3)]),
    (
        Cell(
            "FSDP2, not resharded, recomputed",
            2,
            "AccelTrainer",
            {"fsdp": "shard_grad_op", "gradient_checkpointing": True, "bf16": True},
            layers=7,
        ),
        [(1, 24), (3, 8), (12, 2)],
    ),
    (Cell("tensor", 2, "AccelTrainer", {"tensor_parallel_size": 2}, layers=7), [(1, 6), (3, 2), (6, 1)]),
    (Cell("LoRA", adapter=True), [(1, 6), (3, 2), (6, 1)]),
    (Cell("convolutions", model="own"), [(1, 6), (3, 2), (6, 1)]),
    *(
        (
            Cell(f"ZeRO {stage}", 2, "AccelTrainer", {"deepspeed": {"zero_optimization": {"stage": stage}}}),
            [(1, 6), (3, 2), (6, 1)],
        )
        for stage in (1, 2, 3)
    ),
]


def seconds(work):
    return step_time(work, hardware("h200"), Efficiency(), simulate=None).seconds


@pytest.mark.parametrize(
    ("cell", "batches"), [*QUICK, *(pytest.param(*full, marks=pytest.mark.matrix) for full in FULL)], ids=str
)
def test_plans_of_batches_equal_plans_of_their_own(cell, batches, tmp_path):
    sizes = {"world_size": cell.world_size, "local_world_size": cell.world_size, "device_type": "cuda"}
    found = plan_batches(functools.partial(make_trainer, cell, tmp_path), **sizes, batches=batches)
    assert len(batches) == len(found)
    for (rows, number), (plan, work) in zip(batches, found, strict=True):
        args = {**cell.args, "per_device_train_batch_size": rows, "gradient_accumulation_steps": number}
        own = replace(cell, args=args)
        expected, expected_work = plan_run(functools.partial(make_trainer, own, tmp_path), **sizes)
        assert expected["convolution_bytes"] == plan["convolution_bytes"]
        phases = [one["ranks"][0]["phases"] for one in (plan, expected)]
        for given, wanted in zip(*phases, strict=True):
            assert wanted["num_bytes"] == given["num_bytes"], (rows, number)
            assert (wanted["at"], wanted["rows"]) == (given["at"], given["rows"])
            assert wanted["made_by"] == given["made_by"]
        assert expected_work.executed_flops == work.executed_flops
        assert seconds(work).low == pytest.approx(seconds(expected_work).low, rel=0.002)
        assert seconds(work).high == pytest.approx(seconds(expected_work).high, rel=0.002)
        assert (rows, number) == (
            plan["settings"]["per_device_train_batch_size"],
            plan["settings"]["gradient_accumulation_steps"],
        )


OF_BOTH = [
    (Cell("DDP", 2, "AccelTrainer", layers=7), True),
    (Cell("FSDP2", 2, "AccelTrainer", {"fsdp": "full_shard", "bf16": True}, layers=7), True),
    (Cell("FSDP2, not resharded", 2, "AccelTrainer", {"fsdp": "shard_grad_op"}, layers=7), True),
    (Cell("tensor", 2, "AccelTrainer", {"tensor_parallel_size": 2}, layers=7), True),
    (Cell("tensor, FSDP2", 4, "AccelTrainer", {"tensor_parallel_size": 2, "fsdp": "full_shard"}, layers=7), True),
    (Cell("LoRA", adapter=True), True),
    (Cell("own module", model="own"), True),
    *(
        (Cell(f"ZeRO {stage}", 2, "AccelTrainer", {"deepspeed": {"zero_optimization": {"stage": stage}}}), stage < 3)
        for stage in (1, 2, 3)
    ),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("cell", "is_shared"),
    [(Cell("single", layers=6), True), *(pytest.param(*one, marks=pytest.mark.matrix) for one in OF_BOTH)],
    ids=str,
)
def test_one_trainer_is_traced_with_and_without_recomputation(cell, is_shared, tmp_path):
    """Plans are equal to those of two trainers; ZeRO 3 learns the order of modules once, and needs its own."""
    sizes = {"world_size": cell.world_size, "local_world_size": cell.world_size, "device_type": "cuda"}
    batches = [(1, 6), (3, 2), (6, 1)]
    built = []

    def make(recomputes, hook):
        built.append(recomputes)
        own = replace(cell, args={**cell.args, "gradient_checkpointing": recomputes})
        return make_trainer(own, tmp_path, hook)

    found = plans_by_recomputation(functools.partial(make, True), **sizes, batches=batches)
    assert len(built) == (2 if cell.layers > DEEPER else 1)
    assert [True, False][: len(found)] == [*found]
    assert is_shared == (False in found)
    for recomputes, plans in found.items():
        expected = plans_by_offload(functools.partial(make, recomputes), **sizes, batches=batches)
        assert expected == plans
    # The control: recomputation changes the plan.
    peaks = [max(one["num_bytes"] for one in plans[()][0][0]["ranks"][0]["phases"]) for plans in found.values()]
    assert len(peaks) == 1 or peaks[0] < peaks[1]


STATE = ("parameters", "gradients", "optimizer")
SHARDED = {"fsdp": "full_shard"}
RECOMPUTED = {"fsdp": "shard_grad_op", "bf16": True, "gradient_checkpointing": True}
HOST = {"fsdp_config": {"cpu_offload": True}}


def zero(stage, *names, **more):
    buckets = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    settings = {"stage": stage, **buckets, **{name: {"device": "cpu"} for name in names}}
    return {"deepspeed": {"zero_optimization": settings}, **more}


OPTIMIZER, BOTH = ("offload_optimizer",), ("offload_optimizer", "offload_param")
OFFLOADED = [
    (2, SHARDED, {**SHARDED, **HOST}, STATE, 0.0001),
    (4, {**SHARDED, "tensor_parallel_size": 2}, {**SHARDED, "tensor_parallel_size": 2, **HOST}, STATE, 0.0001),
    # Without offload, stage 2 holds gradients twice while it sums them, see `offload.py`.
    (2, zero(2), zero(2, *OPTIMIZER), STATE[1:], 0.25),
    (2, zero(3), zero(3, *OPTIMIZER), STATE[1:], 0.0001),
    (2, zero(3, bf16=True), zero(3, *BOTH, bf16=True), STATE, 0.0001),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world_size", "args", "own_args", "parts", "above", "layers"),
    [
        (2, RECOMPUTED, {**RECOMPUTED, **HOST}, STATE, 0.0001, 2),
        *(pytest.param(*one, 6, marks=pytest.mark.matrix) for one in OFFLOADED),
    ],
    ids=["FSDP2, not resharded", "FSDP2", "tensor, FSDP2", "ZeRO 2", "ZeRO 3", "ZeRO 3, bf16"],
)
def test_plans_of_offloaded_state_follow_from_traces_without_offload(
    world_size, args, own_args, parts, above, layers, tmp_path
):
    def planned(plans, args, **more):
        args = {"optim": "adamw_torch", **args}
        cell = Cell("", world_size, "AccelTrainer", args, layers=layers, length=8)
        make = functools.partial(make_trainer, cell, tmp_path)
        sizes = {"world_size": world_size, "local_world_size": world_size, "device_type": "cuda"}
        return plans(make, **sizes, batches=[(2, 4), (2, 1), (1, 2)][: layers // 2], **more)

    found = planned(plans_by_offload, args, offloads=[parts])
    for (plan, work), (own, own_work), (base, _) in zip(
        found[parts], planned(full_plans, own_args), found[()], strict=True
    ):
        peaks = [max(one["num_bytes"] for one in run["ranks"][0]["phases"]) for run in (plan, own, base)]
        assert -0.015 <= peaks[0] / peaks[1] - 1 <= above
        # The control: without what is offloaded, the plan is another one.
        assert peaks[2] > 1.2 * peaks[1]
        assert {key: n for key, n in work.ranks[0].messages.items() if "host" in key.name} == {
            key: n for key, n in own_work.ranks[0].messages.items() if "host" in key.name
        }
        for use in ("parameters", "optimizer"):
            sizes = [{row["name"]: row["num_bytes"] for row in run["ranks"][0]["host"]}.get(use) for run in (plan, own)]
            assert sizes[0] == sizes[1]
            assert (sizes[0] is not None) == (use in parts)
        assert own_work.executed_flops == work.executed_flops


@pytest.mark.matrix
def test_no_line_is_drawn_through_rows_that_run_another_program(tmp_path):
    cell = Cell("single", args={"per_device_train_batch_size": 8})

    def make(hook):
        def odd(function):
            def build(*args, **kwargs):
                model = hook(function)(*args, **kwargs)
                model.register_forward_pre_hook(allocate, with_kwargs=True)
                return model

            return build

        return make_trainer(cell, tmp_path, odd)

    def allocate(_, args, kwargs):
        rows = len(kwargs.get("input_ids", args[0] if args else ()))
        if rows == 1:
            torch.ones(2**24)

    sizes = {"world_size": 1, "local_world_size": 1}
    (_, plan, _), (expected,) = (
        [one for one, _ in plan_batches(make, **sizes, batches=batches)]
        for batches in ([(1, 8), (4, 2), (2, 4)], [(4, 2)])
    )
    assert expected["ranks"][0]["phases"][0]["num_bytes"] == plan["ranks"][0]["phases"][0]["num_bytes"]


@pytest.mark.matrix
def test_micro_batches_of_one_row_are_not_padded(tmp_path):
    sizes = {"world_size": 1, "local_world_size": 1}
    batches = [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]

    def make(hook, rows=1, number=12):
        args = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": number}
        return trainer(tmp_path, PADDED, hook, model=shared_heads, **args)

    built = []

    def noting(hook):
        built.append(hook)
        return make(hook)

    for (rows, number), (plan, _) in zip(batches, plan_batches(noting, **sizes, batches=batches), strict=True):
        expected, _ = plan_run(functools.partial(make, rows=rows, number=number), **sizes)
        assert expected["ranks"][0]["phases"][0]["num_bytes"] == plan["ranks"][0]["phases"][0]["num_bytes"], rows
    # One and six rows run other programs; two and six run one.
    assert 2 == len(built)
