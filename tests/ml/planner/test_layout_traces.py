"""Traces of layouts and precisions: the figures of real runs, and what a plan counts."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forgather.launcher_env import ProcessFacts
from forgather.ml import AccelTrainingArguments
from forgather.ml.planner.allocations import Region
from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.offload import offloaded_parts
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.strategy.deepspeed import DeepSpeedZero
from forgather.ml.strategy.deepspeed_config import zero_config
from forgather.ml.strategy.shapes_only import fill_with_fakes
from forgather.project import Project
from tests.ml.planner.cells import SHARDED, Cell, traced

PARALLEL = Path(__file__).parents[3] / "projects" / "parallel"


def maker(config, *overrides):
    return lambda hook: Project(config, PARALLEL, overrides=overrides).build_with(hook, "main")


@pytest.mark.matrix
def test_pipeline_counts_a_tied_weight_once_and_has_a_row_of_logits():
    plan, _ = plan_run(maker("pipeline_1f1b.yaml"), world_size=2, local_world_size=2)

    # Both ends hold the embeddings of 1024 tokens.
    assert plan["parameters"] == plan["trainable"] == 492_608
    last = next(rank for rank in plan["ranks"] if rank["stages"] == (1,))
    logits = {
        phase["phase"]: row["num_bytes"] for phase in last["phases"] for row in phase["rows"] if row["name"] == "logits"
    }
    rows, tokens, vocabulary = 16, 64, 1024
    assert logits["evaluation"] >= 4 * rows * tokens * vocabulary


@pytest.mark.matrix
def test_slices_of_shards_need_what_four_ranks_needed():
    facts = ProcessFacts(rank=1, local_rank=1, world_size=4, local_world_size=4)
    overrides = ("+main.args.fsdp", "full_shard"), ("main.args.per_device_train_batch_size", "4")
    _, peak = trace_rank(maker("tensor.yaml", *overrides), facts).peak

    # `torch.profiler` (profile_memory) on gloo: weights and state of 1.684 MB, and 11.011 MB above them.
    assert pytest.approx(12_695_544, rel=0.005) == peak.num_bytes


def _flops_of_training(trace):
    return sum(one.flops * count for one, count in trace.operations.items() if one.phase in ("forward", "backward"))


@pytest.mark.matrix
def test_divided_rows_have_half_of_the_logits_and_two_exchanges_in_each_block():
    whole = trace_rank(maker("single.yaml"), ProcessFacts())
    facts = ProcessFacts(rank=1, local_rank=1, world_size=2, local_world_size=2)
    found = trace_rank(maker("context.yaml"), facts)

    number = 16 * 32 * 64 * 4  # of bytes: rows, positions of a rank, channels of all heads, float32
    expected = {
        ("forward", 3 * number): 8,
        ("forward", number): 8,
        ("backward", 3 * number): 8,
        ("backward", number): 8,
    }
    exchanges = {(one.phase, one.num_bytes): count for one, count in found.messages.items() if "all_to_all" in one.name}
    assert expected == exchanges
    assert found.peak[1].num_bytes < 0.65 * whole.peak[1].num_bytes
    # Half of the heads over all positions, and all of a layer for half of the positions.
    flops = [_flops_of_training(each) for each in (found, whole)]
    assert pytest.approx(flops[1] / 2, rel=0.01) == flops[0]


STATE = ("parameters", "gradients", "optimizer")


def offload_trace(folder, device_type="cuda", **args):
    args = {**SHARDED, "optim": "adamw_torch", **args}
    return traced(Cell("", 2, "AccelTrainer", args, layers=2, length=8, device_type=device_type), folder)[0]


def counted(work, *names):
    return sum(size.num_bytes * count for size, count in work.items() if size.name in names)


ACCUMULATED = {"bf16": True, "gradient_accumulation_steps": 3}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "args", [pytest.param({}, marks=pytest.mark.matrix), ACCUMULATED], ids=["float32", "accumulated"]
)
def test_offloaded_weights_are_memory_of_the_host_and_are_copied_where_they_are_gathered(tmp_path, args):
    offloaded = offload_trace(tmp_path, fsdp_config={"cpu_offload": True}, **args)
    device, host = (
        offload_trace(tmp_path, **args),
        offload_trace(tmp_path, "cpu", fsdp_config={"cpu_offload": True}, **args),
    )

    # What is left on the device is the rest of the same step, with the buffers, and shards that pass.
    for region in (Region("forward", 2), Region("backward", 2)):
        rest = {use: size for use, size in device.peaks[region].categories.items() if use not in STATE}
        assert {**rest, "buffers": 64} == {**offloaded.peaks[region].categories}
    # The largest unit is a block: the embeddings and the output layer are units of their own, and smaller.
    shard = (offloaded.facts.parameters - 2 * 512 * 64 - 64) // 2 * 4 // 2
    assert {"copied shards": 2 * shard} == offloaded.facts.untraced
    # One weight after the other is updated, as on processors, and nothing of that is on the device.
    there = offloaded.peaks[Region("host", -1)]
    assert {"buffers", "batch"} >= {*offloaded.peaks[Region("update", -1)].categories}
    size = 4 * offloaded.facts.parameters // 2
    assert [size, size] == [pytest.approx(there.categories[use], rel=0.001) for use in ("parameters", "gradients")]
    update = host.peaks[Region("update", -1)]
    assert pytest.approx(update.num_bytes - update.categories["batch"], abs=200) == there.num_bytes
    # A copy to the device for each gathering, whole weights over two ranks; one back for each sum of gradients.
    float32 = 2 if "bf16" in args else 1
    assert counted(device.messages, "c10d._allgather_base_") * float32 == 2 * counted(
        offloaded.messages, "host.to_device"
    )
    assert size * args.get("gradient_accumulation_steps", 1) == pytest.approx(
        counted(offloaded.messages, "host.to_host"), rel=0.001
    )
    added = [one for one in offloaded.operations if one.phase == "host" and one.name == "aten.add_" and one.flops == 0]
    assert ("bf16" in args) == any(one.num_bytes == 3 * shard for one in added)
    assert not any(one.phase == "update" for one in offloaded.operations)
    assert "parameters, gradients, optimizer are in the memory of the host" in offloaded.facts.notes[-1]
    assert (() if "bf16" not in args else host.facts.notes) == device.facts.notes
    assert Region("host", -1) not in host.peaks


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [2, 3])
def test_what_an_engine_offloads_is_memory_of_the_host(tmp_path, stage):
    def trace(*names):
        zero = {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
        zero |= {name: {"device": "cpu"} for name in names}
        return offload_trace(tmp_path, fsdp=None, deepspeed={"zero_optimization": zero})

    device, offloaded = trace(), trace("offload_optimizer")
    at = Region("forward", 2)
    size = 4 * -(-device.facts.parameters // 2)
    # DeepSpeed keeps the gradient of the largest weight on the device, on its way.
    largest = 4 * 512 * 64 if stage == 2 else 0
    state = sum(device.peaks[at].categories.get(use, 0) for use in ("optimizer", "gradients"))
    assert pytest.approx(device.peaks[at].num_bytes - state + largest, abs=64) == offloaded.peaks[at].num_bytes
    there = offloaded.peaks[Region("host", -1)].categories
    # Weights in float32 and two moments; at stage 2, a copy of the weights for the model.
    assert pytest.approx(3 * size, rel=0.01) == device.peaks[at].categories["optimizer"]
    assert pytest.approx(3 * size, rel=0.01) == there["optimizer"]
    assert pytest.approx(size if stage == 2 else 0, rel=0.01) == there.get("buckets", 0)
    assert pytest.approx(size, rel=0.001) == counted(
        {key: count for key, count in offloaded.messages.items() if key.phase == "update"}, "host.to_device"
    )
    if stage == 3:
        both = trace("offload_optimizer", "offload_param")
        assert pytest.approx(size, rel=0.001) == both.peaks[Region("host", -1)].categories["parameters"]
        assert pytest.approx(offloaded.peaks[at].num_bytes - size, abs=1000) == both.peaks[at].num_bytes


@pytest.mark.parametrize(
    ("offloaded", "rows"),
    [
        ({}, ()),
        ({"offload_optimizer": {"device": "cpu"}}, ("gradients", "optimizer")),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            ("parameters", "gradients", "optimizer"),
        ),
    ],
    ids=["none", "optimizer", "weights too"],
)
def test_the_rows_that_an_engine_offloads_are_those_of_its_settings(offloaded, rows):
    engine = DeepSpeedZero.__new__(DeepSpeedZero)
    args = AccelTrainingArguments("out", use_cpu=True, deepspeed={"zero_optimization": {"stage": 3, **offloaded}})
    engine.config = zero_config(args.deepspeed, args, processes=2, on_cpu=True)
    assert rows == offloaded_parts(engine)


def test_float16_with_a_loss_scale_is_traced_to_the_end_of_the_step():
    facts = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)
    trace = trace_rank(maker("ddp.yaml", ("+main.args.fp16", "true")), facts, depth=1)

    # Two moments for each weight: the step is not skipped.
    _, peak = trace.peak
    assert pytest.approx(2 * peak.categories["parameters"], rel=0.01) == peak.categories["optimizer"]


def test_integers_of_a_model_without_values_are_zero():
    model = nn.Module()
    with torch.device("meta"):
        model.register_buffer("kinds", torch.zeros(8, dtype=torch.long))

    torch.use_deterministic_algorithms(True)  # what is not initialized is the largest number, no chance zero
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), RealIntegers():
            fill_with_fakes(model)
    finally:
        torch.use_deterministic_algorithms(False)

    assert [0] * 8 == model.kinds.tolist()
