"""Chained stages equal the whole model, bit for bit, without any process group."""

import gc
import itertools
import math
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, MixtralConfig, T5Config, T5ForConditionalGeneration

from forgather.errors import TrainingError
from forgather.ml.activation_checkpointing import checkpoint_activations
from forgather.ml.strategy.pipeline.blocks import find_blocks
from forgather.ml.strategy.pipeline.local_stages import tied_parameters
from forgather.ml.strategy.pipeline.split import SplitPlan, plan_split
from forgather.ml.strategy.pipeline.stage import blocks_of_stage, make_stage
from forgather.ml.strategy.pipeline.trace import NumbersUnread, on_meta_device
from tests.matrix import thinned
from tests.ml.pipeline.models import (
    TRANSFORMERS,
    Block,
    Numbers,
    Plain,
    Remembers,
    Residual,
    chain,
    transformer,
)


def checkpointed(stage):
    checkpoint_activations(blocks_of_stage(stage).values(), "full")


def stages_of(model, plan):
    return [make_stage(model, plan, index) for index in range(plan.num_stages)]


def in_training(model, inputs, **keywords):
    """Logits as a training sees them: with a cache, transformers takes packed rows for one document."""
    if hasattr(model, "config"):
        return model(inputs, use_cache=False, **keywords).logits
    return model(inputs, **keywords)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def whole_and_chained(model, inputs, plan, *, prepare=None, **keywords):
    """Outputs and gradients of the whole model, and of its stages one after the other."""
    found = []
    parts = stages_of(model, plan)
    for part in parts:
        if prepare is not None:
            prepare(part)
    for run in ("whole", "chained"):
        model.zero_grad()
        states = inputs
        if run == "whole":
            states = in_training(model, inputs, **keywords)
        else:
            for part in parts:
                states = part(states, **keywords)
        states.square().sum().backward()
        found.append((states.detach(), gradients(model)))
    return found


def assert_same(expected, actual):
    # Rows that are padding alone are not a number with some masks, in the whole model as in its stages.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_equal(whole, chained):
    assert_same(whole[0], chained[0])
    assert set(whole[1]) == set(chained[1])
    for name, gradient in whole[1].items():
        if gradient is None:
            assert chained[1][name] is None, name
        else:
            assert_same(gradient, chained[1][name])


IDS = torch.randint(3, 48, (3, 12), generator=torch.Generator().manual_seed(1))
PACKED = torch.tensor([[*range(5), *range(7)], [*range(12)], [*range(3), *range(4), *range(5)]])
PADDED = torch.tensor([[1] * 12, [1] * 9 + [0] * 3, [1] * 5 + [0] * 7])
KEYWORDS = {"causal": {}, "packed": {"position_ids": PACKED}, "padded": {"attention_mask": PADDED}}


@pytest.mark.parametrize("kind", thinned(TRANSFORMERS, lambda kind: TRANSFORMERS.index(kind) % 2 == 1))
def test_chained_stages_equal_the_whole_transformer(kind):
    model = transformer(kind)
    plan = plan_split(on_meta_device(model), "auto", 4)
    for keywords in KEYWORDS.values():
        assert_equal(*whole_and_chained(model, IDS, plan, **keywords))


@pytest.mark.parametrize(
    ("cuts", "kind"),
    thinned(
        itertools.product([(0, 2), (2, 5), (0, 5), (1, 2, 3, 4), (0, 1, 2, 3, 4, 5)], ["llama", "gpt2", "qwen2"]),
        lambda cuts, kind: kind == "llama" or cuts == (0, 5),
    ),
    ids=str,
)
def test_embedding_and_head_may_be_stages_of_their_own(kind, cuts):
    model = transformer(kind)
    plan = SplitPlan(blocks=find_blocks(on_meta_device(model)), cuts=cuts)
    assert_equal(*whole_and_chained(model, IDS, plan, position_ids=PACKED))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_are_made_by_each_stage_as_the_whole_model_makes_them(attention):
    model = transformer("qwen2", attn_implementation=attention)
    plan = plan_split(on_meta_device(model), {"layer.1": "end", "layer.3": "end"}, 3)
    whole, chained = whole_and_chained(model, IDS, plan, position_ids=PACKED)
    assert_equal(whole, chained)
    assert not torch.allclose(in_training(model, IDS), whole[0])


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Plain, torch.randint(0, 20, (2, 6))),
        (Numbers, torch.randn(3, 5, dtype=torch.float64)),
        (chain, torch.randn(3, 5, dtype=torch.float64)),
    ],
)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_chained_stages_equal_the_whole_plain_module(make, inputs, num_stages):
    torch.manual_seed(0)
    model = make().double()
    plan = plan_split(on_meta_device(model), num_stages)
    assert_equal(*whole_and_chained(model, inputs, plan))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_recomputed_blocks_give_the_same_gradients(kind):
    model = transformer(kind).train()
    plan = plan_split(on_meta_device(model), "auto", 3)
    calls = []
    block = model.get_submodule(plan.blocks.block_name(1))
    norm = next(module for name, module in block.named_modules() if "norm" in name or name.startswith("ln"))
    norm.register_forward_hook(lambda *_: calls.append(1))
    assert_equal(*whole_and_chained(model, IDS, plan, prepare=checkpointed, position_ids=PACKED))
    assert 3 == len(calls)  # whole; chained; recomputed


def test_the_library_may_recompute_blocks_too():
    model = transformer("llama").train()
    plan = plan_split(on_meta_device(model), "auto", 3)

    def enable(part):
        part.activation_checkpointing_enable({"use_reentrant": False})

    assert_equal(*whole_and_chained(model, IDS, plan, prepare=enable, position_ids=PACKED))


def test_plain_blocks_are_recomputed():
    torch.manual_seed(0)
    model = Plain().double()
    plan = plan_split(on_meta_device(model), 3)
    inputs = torch.randint(0, 20, (2, 6))
    assert_equal(*whole_and_chained(model, inputs, plan, prepare=checkpointed))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_names_are_those_of_the_model_and_each_is_in_one_stage(kind):
    model = transformer(kind)
    plan = plan_split(on_meta_device(model), "auto", 3)
    parts = stages_of(on_meta_device(model), plan)
    names = [name for part in parts for name, _ in part.named_parameters()]
    whole = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(whole) == sorted(names)
    assert {parameter.device.type for part in parts for parameter in part.parameters()} == {"meta"}
    for index, part in enumerate(parts):
        assert list(plan.span(index)) == [int(name.rpartition(".")[2]) for name in blocks_of_stage(part)]
        assert all(plan.holds(index, name) for name, _ in part.named_parameters())
        assert (index == 0, index == 2) == (part.pipeline_part.is_first, part.pipeline_part.is_last)
        assert type(model).__name__ == type(part).__name__


def test_a_stage_on_meta_is_filled_by_name_and_computes():
    model = transformer("llama")
    plan = plan_split(on_meta_device(model), "auto", 2)
    states = IDS
    for index in range(2):
        part = make_stage(on_meta_device(model), plan, index).to_empty(device="cpu")
        part.load_state_dict({name: value for name, value in model.state_dict().items() if plan.holds(index, name)})
        for name, buffer in part.named_buffers():
            buffer.copy_(model.get_buffer(name))
        states = part(states, position_ids=PACKED)
    assert torch.equal(in_training(model, IDS, position_ids=PACKED), states)


def test_a_stage_infers_its_shapes_on_meta_device():
    model = on_meta_device(transformer("gpt2"))
    plan = plan_split(model, "auto", 2)
    with torch.no_grad(), NumbersUnread():
        states = make_stage(model, plan, 0)(IDS.to("meta"), position_ids=PACKED.to("meta"))
        logits = make_stage(model, plan, 1)(states)
    assert ((3, 12, 16), torch.float64) == (tuple(states.shape), states.dtype)
    assert (3, 12, 48) == tuple(logits.shape)


def test_tied_ends_are_named_on_both_stages():
    model = transformer("gpt2")
    plan = plan_split(on_meta_device(model), "auto", 3)
    (tied,) = tied_parameters(on_meta_device(model), plan)
    assert ((0, "transformer.wte.weight"), (2, "lm_head.weight")) == tied.copies
    assert [] == tied_parameters(transformer("llama"), plan_split(transformer("llama"), 2))
    plain = Plain()
    (tied,) = tied_parameters(plain, plan_split(plain, 2))
    assert ((0, "words.weight"), (1, "words.weight")) == tied.copies


def test_nothing_of_a_forward_pass_is_kept():
    model = transformer("llama")
    parts = stages_of(model, plan_split(model, 2))
    states = parts[0](IDS)
    logits = parts[1](states)
    seen = weakref.ref(logits)
    del logits, states
    gc.disable()
    try:
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("make", "words"), [(Residual, "used in 'blocks.0'"), (Remembers, "used after 'blocks'")])
def test_what_goes_around_the_hidden_states_is_refused(make, words):
    with pytest.raises(TrainingError, match=words) as caught:
        plan_split(make(), 2)
    assert "FG754" == caught.value.code


class _Shared(Plain):
    """One module that every block's output passes through."""

    def forward(self, ids):
        states = self.words(ids)
        for block in self.blocks:
            states = self.norm(block(states))
        return states


class _Unseen(Residual):
    """Its forward pass cannot be watched: it looks at numbers."""

    def forward(self, values):
        if values.float().mean().tolist() > 1e9:
            return values
        return super().forward(values)


def test_a_module_that_blocks_share_is_refused():
    with pytest.raises(TrainingError, match="uses 'norm' in blocks 0 to 2 of 'blocks'"):
        plan_split(_Shared(), 2)


def test_what_could_not_be_watched_is_refused_at_the_first_step():
    torch.manual_seed(0)
    model = _Unseen()
    plan = plan_split(model, 2)
    first, second = stages_of(model, plan)
    with pytest.raises(
        TrainingError, match="uses more of what it computes before its blocks than the hidden states"
    ) as caught:
        second(first(torch.randn(2, 5)))
    assert "FG754" == caught.value.code


def test_hidden_states_that_are_no_numbers_are_no_leak():
    model = transformer("llama")
    _, second = stages_of(model, plan_split(model, 2))
    states = torch.randn(3, 12, 16, dtype=torch.float64)
    assert second(states * math.nan).isnan().all()
    assert not second(states).isnan().any()


class _Unordered(nn.Module):
    """Made in another order than it is called, and not to be watched."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, values):
        assert values.sum().tolist() is not None
        for block in self.blocks:
            values = block(values)
        return self.out(values)


def test_a_module_made_out_of_order_is_named_when_it_is_called():
    model = _Unordered()
    first, second = stages_of(model, plan_split(model, 2))
    with pytest.raises(TrainingError, match="'out' is used after the first block of a later stage"):
        second(first(torch.randn(2, 8)))


def test_a_bare_parameter_that_could_not_be_watched_is_named():
    class Bare(_Unordered):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))

    with pytest.raises(TrainingError, match="a parameter 'shift' of its own"):
        plan_split(Bare(), 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no list of two or more blocks"),
        (lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES)), "has an encoder and a decoder"),
        (lambda: _TwoLists(), r"has 2 lists of blocks.*'left' \(3\), 'right' \(2\)"),
    ],
)
def test_a_model_without_one_list_is_refused(make, words):
    with pytest.raises(TrainingError, match=words) as caught, torch.device("meta"):
        find_blocks(make())
    assert "FG750" == caught.value.code


T5_SIZES = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}


class _TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_is_cut_like_its_model():
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(transformer("llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    plan = plan_split(on_meta_device(model), {"layer.1": "end"}, 2)
    assert "base_model.model.model.layers" == plan.blocks.name
    whole, chained = whole_and_chained(model, IDS, plan, position_ids=PACKED)
    assert_equal(whole, chained)
    assert any(gradient is not None for gradient in chained[1].values())
    assert any(gradient is None for gradient in chained[1].values())


def test_a_loss_of_routers_is_refused():
    with torch.device("meta"):
        model = transformer("mixtral", output_router_logits=True)
    assert isinstance(model.config, MixtralConfig)
    with pytest.raises(TrainingError, match="adds a loss of its routers") as caught:
        plan_split(model, 2)
    assert "FG754" == caught.value.code


def test_the_model_stays_whole():
    model = transformer("llama")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    stages_of(model, plan_split(model, 3))
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert isinstance(model.config, LlamaConfig)
    assert "LlamaForCausalLM" == type(model).__name__
    assert not hasattr(model, "pipeline_part")
