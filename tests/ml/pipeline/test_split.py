"""`split_spec` in all its forms, its errors, and balance."""

import dataclasses
import functools
import logging

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.errors import PlanError, TrainingError
from forgather.ml.strategy.pipeline.blocks import find_blocks
from forgather.ml.strategy.pipeline.split import get_split_spec, plan_split, unit_costs
from forgather.planner.hardware import hardware
from forgather.planner.stage_cuts import UnitCosts, balanced_cuts
from tests.ml.pipeline.models import chain


@functools.cache
def llama(blocks=8, vocab=64):
    """A model without weights; to plan its cuts changes nothing about it."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, states):
        return self.mlp(states)


class _Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(_Block() for _ in range(24))
        self.norm = nn.LayerNorm(4)

    def forward(self, ids):
        states = self.embed_tokens(ids)
        for layer in self.layers:
            states = layer(states)
        return self.norm(states)


class NamedAsLlama(nn.Module):
    """The names of a Llama of 24 blocks, and little work to look at them."""

    def __init__(self):
        super().__init__()
        self.model = _Body()
        self.lm_head = nn.Linear(4, 8)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


@pytest.mark.parametrize(
    ("spec", "cuts"),
    [
        ({"layer.4": "end", "layer.8": "end", "layer.12": "end"}, (5, 9, 13)),
        ({"transformer.layers.6": "end", "transformer.layers.12": "end"}, (7, 13)),
        ({"model.layers.6": "end", "model.layers.12": "beginning"}, (7, 12)),
        ({"layer.12": "end", "layer.4": "end"}, (5, 13)),
        ({"model.embed_tokens": "end", "model.norm": "beginning"}, (0, 24)),
        ({"layers.0": "beginning", "h.23": "end"}, (0, 24)),
        ({"layer.4": SplitPoint.END, "layer.8": SplitPoint.BEGINNING}, (5, 8)),
        ({"layer.4": "END"}, (5,)),
    ],
)
def test_a_mapping_of_names(spec, cuts):
    assert cuts == plan_split(NamedAsLlama(), spec).cuts


def test_an_alias_is_logged_in_one_line(caplog):
    plan_split(NamedAsLlama(), {"layer.4": "end", "transformer.layers.6": "end"}, 3)
    (line,) = [
        record.getMessage() for record in caplog.records if "stands" in record.message or "is block" in record.message
    ]
    assert "'layer.4' is block 4, 'transformer.layers.6' is block 6" in line
    assert "model.layers.0 to model.layers.23" in line


def test_own_names_are_no_aliases(caplog):
    caplog.set_level(logging.INFO)
    plan_split(NamedAsLlama(), {"model.layers.4": "end"}, 2)
    assert not [record for record in caplog.records if "is block" in record.getMessage()]


def test_a_plan_says_who_holds_what():
    plan = plan_split(NamedAsLlama(), {"layer.4": "end", "layer.8": "end"})
    assert [
        "stage 0: model.embed_tokens, blocks 0 to 4",
        "stage 1: blocks 5 to 8",
        "stage 2: blocks 9 to 23, model.norm, lm_head",
    ] == plan.describe()
    assert plan.holds(0, "model.embed_tokens.weight")
    assert plan.holds(1, "model.layers.5.mlp.up_proj.weight")
    assert not plan.holds(0, "model.layers.5.mlp.up_proj.weight")
    assert not plan.holds(1, "model.layers.50.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ({"layer.24": "end"}, "FG752", "the model has blocks 0 to 23"),
        ({"layer.²": "end"}, "FG751", "names 'layer.²'"),
        ({"layer." + "9" * 5000: "end"}, "FG751", "names 'layer.999"),
        ({"layer.4": "middle"}, "FG755", "gives 'layer.4' the value 'middle'"),
        ({"model.layer.4": "end", "layer.4": "end"}, "FG755", "has two cuts at the same place"),
        ({"layer.4": "end", "layer.5": "beginning"}, "FG755", "has two cuts at the same place"),
        ({}, "FG755", "names no cut"),
        ("half", "FG755", "split_spec is 'half'"),
        (True, "FG755", "split_spec is True"),
        (0, "FG755", "split_spec is 0"),
        ({"model.layers.4.mlp": "end"}, "FG751", "name the block around it: 'model.layers.4'"),
        ({"model": "end"}, "FG751", "is not a block"),
        ({"model.lyers.4": "end"}, "FG751", "did you mean 'model.layers.4'"),
        ({"lm_head": "beginning"}, "FG751", "is after the last block"),
        ({"model.embed_tokens": "beginning"}, "FG751", "is before the first block"),
        ("auto", "FG753", "the number of stages is not given"),
        (30, "FG753", "30 stages are requested, and the model has 24 blocks"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(spec, code, words):
    with pytest.raises(TrainingError) as caught:
        plan_split(NamedAsLlama(), spec)
    assert code == caught.value.code
    assert words in str(caught.value)


def test_cuts_and_ranks_that_disagree_are_refused():
    spec = {"layer.4": "end", "layer.8": "end", "layer.12": "end"}
    with pytest.raises(TrainingError, match="has 3 cuts, which make 4 stages, and the ranks hold 8") as caught:
        plan_split(NamedAsLlama(), spec, 8)
    assert ("FG753", 8, 4) == (caught.value.code, caught.value.expected, caught.value.found)
    with pytest.raises(TrainingError, match="asks for 3 stages, and the ranks hold 4"):
        plan_split(NamedAsLlama(), 3, 4)


def test_a_chain_is_cut_at_its_children():
    assert (2, 4) == plan_split(chain(), {"1": "end", "block.4": "beginning"}).cuts
    with pytest.raises(TrainingError, match="nothing after it"):
        plan_split(chain(), {"5": "end"})


def test_even_blocks_are_balanced():
    assert (2, 4, 6) == plan_split(llama(), "auto", 4).cuts
    assert (4,) == plan_split(llama(), None, 2).cuts
    assert () == plan_split(llama(), "auto", 1).cuts


def test_embedding_and_head_weigh():
    blocks, embedding, head = 24, 3.0, 6.0
    costs = UnitCosts(before=embedding, blocks=(1.0,) * blocks, after=head)
    cuts = balanced_cuts(costs, 4)
    assert (5, 13, 21) == cuts or max(costs.of_stages(cuts)) == 9.0
    wide = plan_split(llama(blocks=24, vocab=2000), "auto", 4)
    spans = [len(wide.span(index)) for index in range(4)]
    assert spans[3] < spans[0] < spans[1]


def test_balance_is_the_best_there_is():
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        values = torch.randint(1, 20, (9,), generator=generator).tolist()
        costs = UnitCosts(before=values[0], blocks=tuple(values[1:8]), after=values[8])
        every = [(a, b) for a in range(1, 7) for b in range(a + 1, 7)]
        best = min(max(costs.of_stages(cuts)) for cuts in every)
        assert best == max(costs.of_stages(balanced_cuts(costs, 3)))


def test_measured_times_take_the_place_of_counted_operations():
    model = llama(blocks=4)
    blocks = find_blocks(model)
    even = unit_costs(model, blocks)
    slow_first = unit_costs(model, blocks, seconds=[0.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    assert (2,) == balanced_cuts(even, 2)
    assert (1,) == balanced_cuts(slow_first, 2)


def test_get_split_spec_names_the_last_block_of_each_stage():
    assert {"model.layers.1": "end", "model.layers.3": "end", "model.layers.5": "end"} == get_split_spec(llama(), 4)
    for blocks, stages in ((8, 5), (3, 4), (3, 5)):
        spec = get_split_spec(llama(blocks=blocks), stages)
        assert plan_split(llama(blocks=blocks), "auto", stages).cuts == plan_split(llama(blocks=blocks), spec).cuts
    with pytest.raises(TrainingError, match="30 stages are requested"):
        get_split_spec(llama(), 30)


def test_faster_devices_get_more_blocks_and_full_ones_fewer():
    # The H100 computes 3.2 times as fast as the A100.
    spec = get_split_spec(llama(), 2, devices=["a100-80gb", "h100-sxm"])
    assert {"model.layers.1": "end"} == spec
    state = 4 * sum(weight.numel() * weight.element_size() for weight in llama().parameters())
    small = dataclasses.replace(hardware("h100-sxm"), memory_bytes=state // 2)
    (cut,) = plan_split(llama(), get_split_spec(llama(), 2, devices=["a100-80gb", small])).cuts
    assert cut > 2
    with pytest.raises(PlanError) as caught:
        get_split_spec(llama(), 2, devices=[small, dataclasses.replace(small, memory_bytes=state // 3)])
    assert "FG947" == caught.value.code
    with pytest.raises(ValueError, match="1 devices are given for 2 stages"):
        get_split_spec(llama(), 2, devices=["a100"])


def test_more_stages_than_blocks_put_the_ends_alone():
    assert (0, 1, 2) == plan_split(llama(blocks=3), "auto", 4).cuts
    assert (0, 1, 2, 3) == plan_split(llama(blocks=3), "auto", 5).cuts


def test_the_outermost_list_is_the_one():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in "abc"})

        def forward(self, values):
            for block in self.blocks.values():
                values = block(values)
            return values

    assert ("blocks.a", "blocks.b", "blocks.c") == find_blocks(Nested()).names
    assert (1,) == plan_split(Nested(), {"blocks.a": "end"}).cuts
