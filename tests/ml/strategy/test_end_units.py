"""Embedding and head of a sharded model are gathered by themselves, and no bit depends on it."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from forgather.errors import DistributedError
from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.fsdp2 import Sharded
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_units import EndUnits, end_units_of, units_of
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.equality import environment, recipe_of, train, windows
from tests.ml.strategy.models import Plain, batches, gpt2, llama

TWO = Layout(data_parallel_size=2, shard_size=2)
TWO_BY_TWO = Layout(data_parallel_size=2, shard_size=2, tensor_parallel_size=2)
IN_ROOT = Sharding(wrap_embeddings=False)
single = functools.partial(llama, dtype="float32", vocab_size=512, layers=3)


def gathered_bytes(model, *, unit_in_use):
    """Returns the bytes of gathered weights that are alive, those of one unit left out."""
    storages = {}
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not unit_in_use:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for weight in group.fsdp_params:
                    whole = getattr(weight, "_unsharded_param", None)
                    for tensor in [*weight.all_gather_outputs, *([] if whole is None else [whole])]:
                        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                        storage = local.untyped_storage()
                        storages[id(storage) if not storage.nbytes() else storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def both(function, *args):
    """Returns what a function returns with and without units for embedding and head."""
    return function(*args, Sharding()), function(*args, IN_ROOT)


def alive_after_forward(layout, sharding):
    """Returns what is gathered after a forward pass under bf16 beside the head, in bytes per parameter."""
    strategy = Sharded(environment(), layout, sharding=sharding, use_cpu=True)
    strategy.build(dataclasses.replace(recipe_of(single), autocast=torch.bfloat16))
    count = sum(parameter.to_local().numel() for parameter in strategy.model.parameters()) * layout.shard_size
    loss = strategy.rule.total(strategy.model, strategy.rule.prepared(batches(1)[0]))
    head = strategy.model.lm_head if isinstance(strategy.model.lm_head, FSDPModule) else None
    during = gathered_bytes(strategy.model, unit_in_use=head) / count
    head_gathered = head is not None and not hasattr(head.weight, "placements")
    loss.backward()
    after = gathered_bytes(strategy.model, unit_in_use=None)
    return during, head_gathered, after


@pytest.mark.parametrize("layout", [TWO, pytest.param(TWO_BY_TWO, marks=pytest.mark.matrix)], ids=["dp2", "dp2tp2"])
def test_little_more_than_the_unit_in_use_is_gathered_after_a_forward_pass(layout, record_property):
    # Under tensor parallelism the head of a whole weight is a DTensor of its slices, gathered or not.
    sliced = layout.tensor_parallel_size > 1
    found = run_ranks(layout.world_size, both, alive_after_forward, layout)
    record_property("bytes_per_parameter", max(own[0] for own, _ in found))
    record_property("in_the_root", max(root[0] for _, root in found))
    for own, root in found:
        in_bytes, head_gathered, after = own
        assert 0 < in_bytes <= 0.05
        assert head_gathered or sliced
        assert 0 == after
        assert root[0] > 0.5  # a control: with all of them in the root unit


def trained(make, sharding):
    strategy = Sharded(environment(), TWO, sharding=sharding, use_cpu=True)
    strategy.build(recipe_of(make))
    strategy.build_optimizer()
    losses, norms = train(strategy, windows(2, updates=2, rows=4))
    return losses, norms, dict(strategy.export())


def test_units_of_their_own_change_no_bit():
    own, root = run_ranks(2, both, trained, single)[0]
    assert own[:2] == root[:2]
    assert all(torch.equal(value, root[2][name]) for name, value in own[2].items())


class ReadsHead(LlamaForCausalLM):
    """Computes its logits as fused losses do: with the weight of the head, and without calling the head."""

    def forward(self, input_ids=None, **inputs):
        inputs.pop("labels", None)
        hidden = self.model(input_ids, **inputs).last_hidden_state
        return {"logits": nn.functional.linear(hidden, self.lm_head.weight)}


def reading():
    model = single()
    model.__class__ = ReadsHead
    return model


def read_and_called():
    return trained(reading, Sharding()), trained(single, Sharding())


@pytest.mark.matrix
def test_the_weight_of_the_head_is_gathered_for_those_that_do_not_call_it():
    read, called = run_ranks(2, read_and_called)[0]
    assert read[:2] == called[:2]
    assert all(torch.equal(value, called[2][name]) for name, value in read[2].items())


def named(ends, model):
    names = {id(module): name for name, module in model.named_modules()}
    return [names.get(id(module)) for module in (ends.embedding, ends.head, ends.body)]


def t5(**changes):
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    return T5ForConditionalGeneration(T5Config(**sizes, **changes))


def adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llama, ["model.embed_tokens", "lm_head", "model"]),
        (functools.partial(llama, tie_word_embeddings=True), [None] * 3),
        (gpt2, [None] * 3),
        (t5, [None] * 3),
        (functools.partial(t5, tie_word_embeddings=False), [None] * 3),  # its encoder has another module
        (adapted, [f"base_model.model.{name}" for name in ("model.embed_tokens", "lm_head", "model")]),
        (Plain, [None] * 3),
    ],
)
def test_which_embedding_and_head_are_units(make, expected):
    model = make()
    units = units_of(model, Sharding())
    found = named(end_units_of(model, units, Sharding()), model)
    assert expected == found
    assert EndUnits() == end_units_of(model, units, IN_ROOT)


def test_what_is_a_unit_already_is_no_unit_again():
    model, sharding = llama(), Sharding(layers=("LlamaDecoderLayer", "lm_head"))
    assert ["model.embed_tokens", None, None] == named(end_units_of(model, units_of(model, sharding), sharding), model)


def groups_after_forward(sharding):
    strategy = Sharded(environment(), Layout(data_parallel_size=4, shard_size=4), sharding=sharding, use_cpu=True)
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    strategy.build(recipe_of(single))
    made = len(torch.distributed.distributed_c10d._world.pg_map) - before
    strategy.build_optimizer()
    losses, norms = train(strategy, windows(1, updates=2, rows=4))
    strategy.evaluate(strategy.rule.prepared(batches(1)[0]))
    weight = strategy.model.model.layers[0].mlp.up_proj.weight
    kept = (weight.to_local() if hasattr(weight, "to_local") else weight).numel() / weight.numel()
    return losses, norms, made, kept, dict(strategy.export())


def halves_and_fully():
    return groups_after_forward(Sharding(reshard_after_forward=2)), groups_after_forward(Sharding())


@pytest.mark.matrix
def test_weights_are_kept_in_groups_of_ranks_after_a_forward_pass():
    halves, fully = run_ranks(4, halves_and_fully)[0]
    assert fully[:2] == halves[:2]
    assert all(torch.equal(value, fully[4][name]) for name, value in halves[4].items())
    assert (0.25, 0.5) == (fully[3], halves[3])
    # The axes of groups of two ranks, once for all units.
    assert halves[2] - fully[2] <= 2


def refused(layout, sharding):
    with pytest.raises(DistributedError) as caught:
        Sharded(environment(), layout, sharding=sharding, use_cpu=True).build(recipe_of(single))
    return caught.value.code, caught.value.message


def test_groups_that_do_not_fit_are_refused():
    for code, message in run_ranks(2, refused, TWO, Sharding(reshard_after_forward=3)):
        assert "FG734" == code
        assert "reshard_after_forward is 3, and 2 ranks" in message
    sliced = Layout(tensor_parallel_size=2)
    for code, message in run_ranks(2, refused, sliced, Sharding(reshard_after_forward=2)):
        assert "FG734" == code
        assert "only without tensor parallelism" in message
