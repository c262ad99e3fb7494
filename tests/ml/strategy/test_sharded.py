"""FSDP2, hybrid shards and tensor parallelism compute what one process computes."""

import dataclasses
import functools

import pytest
import torch
from transformers.optimization import Adafactor

from forgather.errors import DistributedError
from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.fsdp2 import Sharded
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_precision import BFLOAT16, MixedPrecision
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.states import give_state, state_of
from tests.ml.strategy.equality import (
    differences,
    environment,
    evaluated,
    recipe_of,
    reference,
    train,
    windows,
)
from tests.ml.strategy.models import batches, gpt2, llama

MODELS = {"llama": llama, "gpt2": gpt2, "tied llama": functools.partial(llama, tie_word_embeddings=True)}

LAYOUTS = {
    "full": (Layout(data_parallel_size=2, shard_size=2), Sharding()),
    "full 3": (Layout(data_parallel_size=3, shard_size=3), Sharding()),
    "full 4": (Layout(data_parallel_size=4, shard_size=4), Sharding()),
    "grad op": (Layout(data_parallel_size=2, shard_size=2), Sharding.from_arguments("SHARD_GRAD_OP", None)),
    "hybrid": (Layout(data_parallel_size=4, shard_size=2), Sharding(strategy="HYBRID_SHARD")),
    "no shard": (Layout(data_parallel_size=2, shard_size=1), Sharding(strategy="NO_SHARD")),
    "offload": (Layout(data_parallel_size=2, shard_size=2), Sharding(cpu_offload=True)),
    "recompute": (Layout(data_parallel_size=2, shard_size=2), Sharding(recompute="full")),
    "selective": (Layout(data_parallel_size=2, shard_size=2), Sharding(recompute="selective")),
    "prefetch": (Layout(data_parallel_size=2, shard_size=2), Sharding(forward_prefetch=2, backward_prefetch=2)),
    "one unit": (Layout(data_parallel_size=2, shard_size=2), Sharding(wrap="none")),
    "by size": (Layout(data_parallel_size=2, shard_size=2), Sharding(wrap="size", min_num_params=2000)),
}
SLICED = {
    "tensor": (Layout(tensor_parallel_size=2), None),
    "data x tensor": (Layout(data_parallel_size=2, shard_size=2, tensor_parallel_size=2), Sharding()),
    "replicas x tensor": (Layout(data_parallel_size=2, shard_size=1, tensor_parallel_size=2), None),
    "tensor, offload": (
        Layout(data_parallel_size=2, shard_size=2, tensor_parallel_size=2),
        Sharding(cpu_offload=True),
    ),
}


def trained(layout, sharding, recipe, groups, settings):
    strategy = Sharded(environment(), layout, sharding=sharding, use_cpu=True)
    strategy.build(recipe)
    strategy.build_optimizer()
    half = len(groups) // 2
    first = train(strategy, groups[:half], **settings)
    evaluated(strategy, batches(1, seed=9)[0])  # leaves no trace
    second = train(strategy, groups[half:], **settings)
    weights = dict(strategy.export())
    assert all(type(value) is torch.Tensor for value in weights.values())
    return first[0] + second[0], first[1] + second[1], weights if strategy.topology.is_writer else None


def compare(layout, sharding, model, accumulation, **settings):
    recipe = recipe_of(MODELS[model])
    groups = windows(accumulation, rows=12)
    expected = reference(recipe, groups, **settings)
    answers = run_ranks(layout.world_size, trained, layout, sharding, recipe, groups, settings)
    assert all(answers[0][:2] == answer[:2] for answer in answers[1:])
    return differences(answers[0], expected)


@pytest.mark.parametrize(
    ("kind", "model", "accumulation"),
    thinned(
        # Single parts of GPT-2 return views, and fully_shard warns of that.
        [(kind, model, 3) for kind in LAYOUTS for model in ("llama", "gpt2") if (kind, model) != ("by size", "gpt2")]
        + [(kind, model, 1) for kind in ("full", "full 4", "grad op", "hybrid") for model in ("llama", "gpt2")],
        # Cells of tests/ml/distributed train full, hybrid and tensor, too, and a state moves from uneven shards below.
        lambda kind, model, accumulation: (
            (model, accumulation) == ("llama", 3) and kind in ("selective", "offload", "grad op")
        ),
    ),
)
def test_shards_are_equal_to_one_process(kind, model, accumulation):
    found = compare(*LAYOUTS[kind], model, accumulation)
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize(
    ("kind", "model", "accumulation"),
    thinned(
        [(kind, model, 3) for kind in SLICED for model in ("llama", "tied llama")]
        + [(kind, "llama", 1) for kind in ("tensor", "data x tensor")]
        + [("data x tensor", "tied llama", 1)],
        lambda kind, model, accumulation: (kind, model, accumulation) == ("data x tensor", "tied llama", 1),
    ),
)
def test_slices_are_equal_to_one_process(kind, model, accumulation):
    found = compare(*SLICED[kind], model, accumulation)
    assert max(found.values()) <= 1e-10, found


class DoublesGradients(Sharded):
    """A negative control: AdamW with clipping hides the factor in the weights."""

    def update(self, **settings):
        for parameter in self._parameters:
            parameter.grad.mul_(2)
        return super().update(**settings)


class MeansOfMicroBatches(Sharded):
    """A negative control: each micro-batch counts the same, however many targets it has."""

    def forward_backward(self, window, *, denom, after_micro_batch=None):
        def shares():
            for batch in window.batches:
                valid = self.reduce(self.rule.count(batch))
                one = type(window)(batches=[batch], num_valid=valid, num_tokens=1, num_rows=1)
                yield super(MeansOfMicroBatches, self).forward_backward(one, denom=valid * len(window.batches))

        return sum(shares())


class DropsOneRank(Sharded):
    """A negative control: the gradients of the last replica are lost."""

    def forward_backward(self, window, *, denom, after_micro_batch=None):
        last = self.topology.dp_rank == self.topology.dp_size - 1
        return super().forward_backward(window, denom=denom * 1e30 if last else denom)


def trained_wrongly(kind, layout, recipe, groups):
    strategy = kind(environment(), layout, use_cpu=True)
    strategy.build(recipe)
    strategy.build_optimizer()
    losses, norms = train(strategy, groups)
    return losses, norms, dict(strategy.export())


@pytest.mark.parametrize(
    ("kind", "seen_in"),
    # The bench of tests/ml/distributed has the same controls.
    thinned(
        [
            (DoublesGradients, {"grad_norm"}),
            (MeansOfMicroBatches, {"loss", "grad_norm", "updrel"}),
            (DropsOneRank, {"loss", "grad_norm", "updrel"}),
        ],
        lambda kind, seen_in: kind is DropsOneRank,
    ),
)
def test_the_comparison_finds_what_is_wrong(kind, seen_in):
    recipe, groups = recipe_of(llama), windows(3)
    layout = Layout(data_parallel_size=2, shard_size=2)
    found = differences(run_ranks(2, trained_wrongly, kind, layout, recipe, groups)[0], reference(recipe, groups))
    assert seen_in == {name for name, value in found.items() if value > 1e-4}, found


def saved_and_restored(layout, sharding, recipe, groups, state):
    """Trains on the first half and returns the state; or takes a state and trains on the second half."""
    strategy = Sharded(environment(), layout, sharding=sharding, use_cpu=True)
    strategy.build(recipe)
    strategy.build_optimizer()
    if state is not None:
        give_state(strategy, state)
    losses, norms = train(strategy, groups)
    captured = state_of(strategy)
    return losses, norms, captured if strategy.topology.is_writer else None


RESTORED = {
    "full 2": (Layout(data_parallel_size=2, shard_size=2), Sharding()),
    "full 3 (uneven)": (Layout(data_parallel_size=3, shard_size=3), Sharding()),
    "hybrid 4": (Layout(data_parallel_size=4, shard_size=2), Sharding()),
    "tensor x data": (Layout(data_parallel_size=2, shard_size=2, tensor_parallel_size=2), Sharding()),
    "offload": (Layout(data_parallel_size=2, shard_size=2), Sharding(cpu_offload=True)),
}


@pytest.mark.parametrize(
    ("first", "then"),
    # Resumes between layouts are also tested in tests/reliability.
    thinned(
        [("full 2", kind) for kind in RESTORED] + [(kind, "full 2") for kind in list(RESTORED)[1:]],
        lambda first, then: (first, then) == ("full 3 (uneven)", "full 2"),
    ),
)
def test_a_state_moves_between_layouts(first, then):
    def optimizer_of(model):
        named = dict(model.named_parameters())
        large = [parameter for parameter in named.values() if parameter.ndim > 1]
        small = [parameter for parameter in named.values() if parameter.ndim == 1]
        return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0}], lr=1e-3)

    recipe = recipe_of(functools.partial(llama, tie_word_embeddings=True), make_optimizer=optimizer_of)
    groups = windows(2, updates=4, rows=12)
    expected = reference(recipe, groups)
    before = run_ranks(RESTORED[first][0].world_size, saved_and_restored, *RESTORED[first], recipe, groups[:2], None)
    state = before[0][2]
    assert state["model"]["lm_head.weight"].data_ptr() == state["model"]["model.embed_tokens.weight"].data_ptr()
    elsewhere = recipe_of(functools.partial(recipe.make_model, seed=77), make_optimizer=optimizer_of)
    after = run_ranks(RESTORED[then][0].world_size, saved_and_restored, *RESTORED[then], elsewhere, groups[2:], state)
    found = before[0][0] + after[0][0], before[0][1] + after[0][1], after[0][2]["model"]
    assert max(differences(found, expected).values()) <= 1e-10


def test_the_optimizer_state_is_by_name_and_has_no_trace_of_ranks():
    layout = Layout(data_parallel_size=2, shard_size=2)
    state = run_ranks(2, saved_and_restored, layout, Sharding(), recipe_of(gpt2), windows(1), None)[0][2]["optimizer"]
    names = state["param_groups"][0]["params"]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert set(names) == set(state["state"])
    assert torch.Size([64, 32]) == state["state"]["transformer.wte.weight"]["exp_avg"].shape
    assert 3.0 == state["state"]["transformer.wte.weight"]["step"].item()


def refused(layout, make, settings):
    strategy = Sharded(environment(), layout, use_cpu=True, **settings)
    with pytest.raises(DistributedError) as caught:
        strategy.build(recipe_of(make))
    return caught.value.code, str(caught.value)


TWO, SLICES = Layout(data_parallel_size=2, shard_size=2), Layout(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("layout", "make", "settings", "code", "words"),
    [
        (
            TWO,
            llama,
            {"sharding": Sharding(layers=("LlamaDecoderLayers",))},
            "FG735",
            "did you mean 'LlamaDecoderLayer'",
        ),
        (
            TWO,
            llama,
            {"sharding": Sharding(layers=("GPT2Block",))},
            "FG735",
            "it has: Embedding, Linear, LlamaAttention",
        ),
        (SLICES, gpt2, {}, "FG736", "GPT2LMHeadModel has no tensor-parallel plan of its own"),
        (SLICES, gpt2, {"tp_plan": {"transformer.h.*.attn.c_attn": "colwise"}}, "FG736", "which is a Conv1D"),
        (
            SLICES,
            llama,
            {"tp_plan": {"model.layers.*.mlp.up": "colwise"}},
            "FG736",
            "no such module",
        ),
        (SLICES, llama, {"tp_plan": {"lm_head": "columnwise"}}, "FG736", "did you mean 'colwise'"),
        (
            SLICES,
            functools.partial(llama, num_key_value_heads=1),
            {},
            "FG737",
            "num_key_value_heads is 1, which cannot be split evenly over 2 ranks",
        ),
        (
            SLICES,
            functools.partial(llama, intermediate_size=49),
            {},
            "FG737",
            "has out_features 49, which cannot be split evenly over 2 ranks",
        ),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_on_every_rank(layout, make, settings, code, words):
    for found, message in run_ranks(2, refused, layout, make, settings):
        assert (code, True) == (found, words in message), message


def refused_optimizer(optimizer):
    strategy = Sharded(environment(), TWO, use_cpu=True)
    strategy.build(recipe_of(llama, make_optimizer=lambda model: optimizer(model.parameters())))
    with pytest.raises(DistributedError, match="Adafactor cannot step sharded or sliced weights") as caught:
        strategy.build_optimizer()
    return caught.value.code


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adafactor, functools.partial(Adafactor, lr=1e-3, relative_step=False)]
)
def test_an_optimizer_that_needs_whole_weights_is_refused(optimizer):
    assert ["FG738"] * 2 == run_ranks(2, refused_optimizer, optimizer)


def kept_copies(layout, sharding, make):
    """Returns what is in the graph after a forward pass under bf16: bytes of weights of blocks a parameter, and types."""
    strategy = Sharded(environment(), layout, sharding=sharding, use_cpu=True)
    strategy.build(dataclasses.replace(recipe_of(make), autocast=torch.bfloat16))
    strategy.build_optimizer()
    blocks = {name: value.shape for name, value in strategy.model.named_parameters() if ".layers." in name}
    matrices = {shape for shape in blocks.values() if len(shape) == 2}
    kept = {}

    def note(tensor):
        if tensor.shape in matrices or tensor.shape[::-1] in matrices:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = strategy.rule.prepared(batches(1, rows=5)[0])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), strategy.precision.autocast():
        loss = strategy.rule.total(strategy.model, batch)
    # What was gathered is dropped after the forward pass: its memory is empty then.
    in_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    strategy.build_optimizer().step()
    buffers = {buffer.dtype for buffer in strategy.model.buffers()}
    grads = {parameter.grad.dtype for parameter in strategy.model.parameters()}
    exported = {value.dtype for _, value in strategy.export()}
    numel = sum(shape.numel() for shape in blocks.values() if shape in matrices)
    return in_bytes / numel, loss.dtype, buffers | grads | exported


@pytest.mark.parametrize(("sharding", "expected"), [(Sharding(), 0.0), (Sharding(precision=MixedPrecision()), 2.0)])
def test_no_copy_of_the_weights_stays_in_bfloat16_but_under_autocast(sharding, expected):
    make = functools.partial(llama, dtype="float32")
    for in_bytes, loss, kept in run_ranks(2, kept_copies, TWO, sharding, make):
        assert pytest.approx(expected, abs=0.01) == in_bytes
        assert torch.float32 is loss
        assert {torch.float32} == kept


class OwnLoss(torch.nn.Module):
    """Returns its loss, of inputs and labels that bfloat16 would round."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x).squeeze(-1), y)


def loss_of_own(sharding):
    strategy = Sharded(environment(), TWO, sharding=sharding, use_cpu=True)
    strategy.build(dataclasses.replace(recipe_of(OwnLoss), autocast=torch.bfloat16))
    strategy.build_optimizer()
    batch = {"x": torch.ones(4, 4), "y": torch.full((4,), 1001.0)}
    total, count, _ = strategy.evaluate(batch)
    return (total / count).sqrt().item()


def test_inputs_and_labels_of_a_model_with_a_loss_of_its_own_are_not_rounded():
    batch = {"x": torch.ones(4, 4), "y": torch.full((4,), 1001.0)}
    expected = OwnLoss()(**batch).sqrt().item()
    assert [pytest.approx(expected, abs=0.1)] * 2 == run_ranks(2, loss_of_own, Sharding())
    # A control: 1001 is 1000 in bfloat16.
    assert abs(run_ranks(2, loss_of_own, Sharding(precision=BFLOAT16))[0] - expected) > 0.5


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16], lambda dtype: dtype is torch.float16))
def test_half_precision_is_close_to_one_process_and_scales_alike(dtype):
    recipe = dataclasses.replace(recipe_of(functools.partial(llama, dtype="float32")), autocast=dtype)
    exact = reference(recipe_of(functools.partial(llama, dtype="float32")), windows(1, rows=12))
    answers = run_ranks(2, trained, TWO, Sharding(), recipe, windows(1, rows=12), {})
    assert answers[0][:2] == answers[1][:2]
    found = differences(answers[0], exact)
    assert found["loss"] < 1e-3
    assert found["grad_norm"] < 1e-2
