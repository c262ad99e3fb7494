"""Models whose forward pass reads values are planned by formulas that say so, or refused with the line of the code."""

import functools
import gc

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.row_limit import largest_rows
from forgather.ml.planner.untraceable import UntraceableModel, untraceable
from forgather.ml.planner.value_readings import only_new_objects
from tests.ml.distributed.gang import run_ranks
from tests.ml.planner import cell_models
from tests.ml.planner.cells import measured_peak
from tests.ml.planner.task_cells import trainer


class Reading(nn.Module):
    """A model whose path depends on a value."""

    read = staticmethod(lambda hidden: hidden.mean().item())

    def __init__(self):
        super().__init__()
        self.inner = cell_models.model("llama", 2)

    def forward(self, input_ids, labels):
        output = self.inner(input_ids=input_ids, labels=labels)
        if self.read(output.logits) > 1e6:
            raise ValueError("too large")
        return {"loss": output.loss}


class ReadingArrays(Reading):
    read = staticmethod(lambda hidden: hidden.detach().numpy().mean())


class ReadingRows(Reading):
    read = staticmethod(lambda hidden: len(hidden[hidden > 0]) * 0.0)


def plan(make, folder, world_size=1):
    return plan_run(functools.partial(make, folder), world_size=world_size, local_world_size=world_size)


@pytest.mark.parametrize("kind", [Reading, ReadingArrays, ReadingRows])
def test_a_plan_by_formulas_says_so_and_names_the_line(kind, tmp_path):
    found, work = plan(trainer(model=kind), tmp_path)

    (rank,) = found["ranks"]
    (phase,) = rank["phases"]
    assert {"formula"} == {row["source"] for row in phase["rows"]}
    sizes = {row["name"]: row["num_bytes"] for row in phase["rows"]}
    weights = 4 * sum(weight.numel() for weight in {*kind().parameters()})
    assert weights == sizes["gradients"] == pytest.approx(sizes["parameters"], rel=0.01)
    assert 2 * weights == pytest.approx(sizes["optimizer"], rel=0.01)
    (note,) = [note for note in found["notes"] if "reads the value" in note]
    assert "test_untraceable.py:" in note and "read = staticmethod(lambda" in note
    assert 6 * 512 * 0.9 * weights / 4 < sum(operation.flops for operation in work.ranks[0].operations)


def test_processes_that_hold_the_whole_model_have_buckets_besides(tmp_path):
    found, _ = plan(trainer("accel", model=Reading), tmp_path, 2)

    sizes = {row["name"]: row["num_bytes"] for row in found["ranks"][0]["phases"][0]["rows"]}
    assert sizes["buckets"] == sizes["gradients"]


@pytest.mark.matrix
def test_the_formulas_are_near_the_measured_peak_and_not_under_it(tmp_path):
    make = trainer(model=Reading)
    (real,) = run_ranks(1, measured_peak, functools.partial(make, tmp_path))

    found, _ = plan(make, tmp_path)

    assert 0.98 <= found["ranks"][0]["phases"][0]["num_bytes"] / real <= 1.1


def test_what_has_no_formula_is_refused_with_the_line(tmp_path):
    with pytest.raises(UntraceableModel, match=r"test_untraceable\.py:\d+, 'read = .*item") as caught:
        plan(trainer("accel", {"fsdp": "full_shard"}, Reading), tmp_path, 2)
    assert ("FG962", ()) == (caught.value.code, caught.value.traces)

    sizes = {"world_size": 1, "local_world_size": 1, "limit": 10**9, "most": 8}
    with pytest.raises(UntraceableModel):
        largest_rows(functools.partial(trainer(model=Reading), tmp_path), **sizes)


def test_an_error_of_the_model_is_raised_as_it_is(tmp_path):
    class Wrong(Reading):
        read = staticmethod(lambda hidden: hidden @ hidden)

    facts = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with pytest.raises(RuntimeError, match="size|shape|must match"):
        trace_rank(functools.partial(trainer(model=Wrong), tmp_path), facts)
    assert untraceable(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def collected_later(one: object) -> bool:
    """True if the collector looks at an object. A count would not say so: other objects end meanwhile."""
    return any(other is one for other in gc.get_objects())


@pytest.mark.parametrize("was_frozen", [False, True])
def test_objects_that_the_caller_has_frozen_stay_so(was_frozen):
    kept = gc.get_freeze_count()
    gc.unfreeze()
    old: list[object] = []
    try:
        if was_frozen:
            gc.freeze()
        with only_new_objects():
            new: list[object] = []
            assert not collected_later(old) and collected_later(new)
        assert collected_later(old) is not was_frozen
        assert collected_later(new)
    finally:
        gc.unfreeze()
        if kept:
            gc.freeze()


class ReadingWeights(Reading):
    def __init__(self):
        super().__init__()
        self.scale = float(self.inner.lm_head.weight.detach().numpy().std())


def experts(implementation=None):
    config = MixtralConfig(
        vocab_size=cell_models.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    config._experts_implementation = implementation
    return MixtralForCausalLM(config)


class Compiled(torch.optim.SGD):
    """An optimizer that compiles its step, as those of torchao do."""

    @torch.no_grad()
    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        torch.compile(lambda: [weight.sub_(weight.grad) for weight in iter(weights)], fullgraph=True, dynamic=False)()


def test_a_constructor_that_reads_weights_is_refused_with_its_line(tmp_path):
    with pytest.raises(UntraceableModel, match=r"numpy\(\).std") as caught:
        plan(trainer(model=ReadingWeights), tmp_path)
    assert "FG962" == caught.value.code


@pytest.mark.matrix
def test_experts_in_32_bits_are_refused_or_planned_another_way(tmp_path):
    with pytest.raises(PlanError, match="experts") as caught:
        plan(trainer(model=experts), tmp_path)
    assert "FG969" == caught.value.code
    other = trainer(model=functools.partial(experts, "batched_mm"))
    (phase,) = plan(other, tmp_path)[0]["ranks"][0]["phases"]
    cell_models.rows("llama", 64)
    assert phase["num_bytes"] == pytest.approx(run_ranks(1, measured_peak, functools.partial(other, tmp_path))[0], 0.02)


@pytest.mark.matrix
def test_an_optimizer_that_compiles_its_step_is_refused(tmp_path):
    make = trainer(optimizer_factory=lambda weights: Compiled(weights, lr=0.1))
    with pytest.raises(PlanError, match="compiles functions") as caught:
        plan(make, tmp_path)
    assert "FG969" == caught.value.code
