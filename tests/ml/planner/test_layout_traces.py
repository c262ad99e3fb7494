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
from forgather.ml.strategy.initial_weights import fill_with_fakes
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


def test_an_optimizer_of_offloaded_weights_updates_one_at_a_time_on_a_gpu_too(tmp_path):
    def trace(device_type, **more):
        args = {**SHARDED, "optim": "adamw_torch", **more}
        return traced(Cell("", 2, "AccelTrainer", args, layers=2, length=8, device_type=device_type), tmp_path)[0]

    host, device, one = trace("cuda", fsdp_config={"cpu_offload": True}), trace("cuda"), trace("cpu")

    update = Region("update", -1)
    assert host.peaks[update].num_bytes == one.peaks[update].num_bytes < device.peaks[update].num_bytes
    assert ["parameters, gradients, optimizer" in note for note in host.facts.notes] == [True]
    assert () == device.facts.notes


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
