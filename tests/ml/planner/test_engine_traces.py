"""A trace of DeepSpeed's own engine needs as much memory as the engine does."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.value_readings import ReadingZeros
from forgather.project import Project

PARALLEL = Path(__file__).parents[3] / "projects" / "parallel"
# Peaks of real runs on two gloo ranks by `torch.profiler` (profile_memory), deepspeed 0.19.8, torch 2.13.
REAL = {"zero2.yaml": 2_029_350_636, "zero3_offload.yaml": 2_039_241_337}


def trace(config, depth=None, overrides=()):
    facts = ProcessFacts(rank=0, local_rank=0, world_size=2, local_world_size=2)
    return trace_rank(
        lambda hook: Project(config, PARALLEL, overrides=overrides).build_with(hook, "main"), facts, depth=depth
    )


@pytest.mark.matrix
@pytest.mark.parametrize("config", REAL)
def test_traced_peak_is_that_of_the_engine(config):
    _, peak = trace(config).peak

    assert pytest.approx(REAL[config], rel=0.002) == peak.num_bytes


def test_engine_holds_a_bucket_and_its_partitions_and_writes_nothing(tmp_path):
    _, peak = trace("zero2.yaml", depth=1, overrides=[("trainer_args.output_dir", str(tmp_path))]).peak

    assert not [*tmp_path.iterdir()]
    # DeepSpeed allocates a bucket of 500 million gradients by default.
    assert pytest.approx(2_000_000_000, rel=0.01) == peak.categories["buckets"]
    # A float32 copy of this rank's half of the weights, and two moments of it.
    assert pytest.approx(3 / 2 * peak.categories["parameters"], rel=0.01) == peak.categories["optimizer"]


class Reader(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else x + 1


def test_values_are_zero_outside_of_the_model_and_missing_within_it():
    model = Reader()
    with FakeTensorMode(), ReadingZeros(model):
        x = torch.ones(3) * 2
        assert x.sum().item() == 0
        with pytest.raises(DataDependentOutputException):
            model(x)
        assert not bool(torch.isinf(x).any())
