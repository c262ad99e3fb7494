"""Counted FLOPs of model families against closed forms, attention included."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from forgather.ml.planner.operations import WorkCounter
from forgather.planner.work import RankWork, RunWork

TOKENS, ROWS, VOCABULARY, LAYERS, WIDTH, HEADS = 32, 2, 128, 2, 64, 4
GATED = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
# With dropout, the attention on a CPU is computed as plain matrix products, in full.
FAMILIES = {
    "llama": {**GATED, "num_key_value_heads": 2, "intermediate_size": 160},
    "mistral": {**GATED, "num_key_value_heads": 1, "intermediate_size": 96, "sliding_window": None},
    "qwen2": {**GATED, "num_key_value_heads": 4, "intermediate_size": 176},
    "gpt2": {
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "vocab_size": VOCABULARY,
        "n_positions": TOKENS,
        "attn_pdrop": 0.0,
    },
}


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.phase = "forward"
        self.work = WorkCounter(lambda: self.phase)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.work.count(func, args, kwargs or {}, result)
        return result


def closed_form(kind):
    """Three forward passes: 2 FLOPs a weight and token, and half of two products of tokens x tokens x width a layer."""
    sizes = FAMILIES[kind]
    if kind == "gpt2":
        block = 4 * WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH
    else:
        shared = 2 * WIDTH * WIDTH * sizes["num_key_value_heads"] // HEADS
        block = 2 * WIDTH * WIDTH + shared + 3 * WIDTH * sizes["intermediate_size"]
    products = 2 * ROWS * TOKENS * (LAYERS * block + WIDTH * VOCABULARY)
    attention = ROWS * LAYERS * 4 * TOKENS * TOKENS * WIDTH // 2
    return 3 * (products + attention)


def test_questions_about_a_tensor_are_no_work():
    counting = Counting()
    with FakeTensorMode():
        tensor = torch.ones(1000)
    for func, result in ((torch.ops.prim.device.default, tensor.device), (torch.ops.aten.neg.default, tensor)):
        counting.work.count(func, (tensor,), {}, result)
    assert ["aten.neg"] == [operation.name for operation in counting.work.operations]


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_flops_of_a_family_are_those_of_its_closed_form(kind, record_property):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FAMILIES[kind]))
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    with Counting() as counting:
        loss = model(input_ids=ids, labels=ids).loss
        counting.phase = "backward"
        loss.backward()
    one = RankWork(ranks=(0, 0), stages=(), operations=counting.work.operations, messages={})
    run = RunWork(
        world_size=1,
        local_world_size=1,
        rows_per_update=ROWS,
        tokens_per_row=TOKENS,
        num_updates=1,
        schedule=None,
        micro_batches=1,
        schedule_runs=1,
        ranks=(one,),
    )
    record_property("figure: apart", f"{run.model_flops / closed_form(kind) - 1:+.2%}")
    assert run.model_flops == pytest.approx(closed_form(kind), rel=0.005)
    # The backward pass of attention computes the scores again.
    again = ROWS * LAYERS * 2 * TOKENS * TOKENS * WIDTH // 2
    assert run.executed_flops - run.model_flops == pytest.approx(again, rel=0.005)


def test_operators_that_only_allocate_move_nothing():
    work = WorkCounter(lambda: "forward")
    given = torch.empty(4, 6)
    for func, args in (
        (torch.ops.aten.empty.memory_format, ([4, 6],)),
        (torch.ops.aten.new_empty.default, (given, [4, 6])),
        (torch.ops.aten._unsafe_view.default, (given, [6, 4])),
        (torch.ops.aten.zeros_like.default, (given,)),
    ):
        work.count(func, args, {}, func(*args))
    assert [0, 0, 0, 2 * 96] == [one.num_bytes for one in work.operations]


def test_products_that_are_added_in_place_count():
    work = WorkCounter(lambda: "forward")
    sums, left, right = torch.zeros(4, 6), torch.ones(4, 3), torch.ones(3, 6)
    work.count(torch.ops.aten.addmm_.default, (sums, left, right), {}, sums)
    assert [2 * 4 * 3 * 6] == [one.flops for one in work.operations]
