"""Traces of layouts and precisions: the figures of real runs, and what a plan counts."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.strategy.initial_weights import fill_with_fakes
from forgather.project import Project

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
