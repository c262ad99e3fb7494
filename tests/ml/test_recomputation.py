"""Activations that are recomputed, kept or moved to the host: no bit depends on it, and memory and work do."""

import collections
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forgather.errors import TrainingError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, TrainingArguments
from forgather.ml.activation_checkpointing import is_costly
from forgather.ml.distributed.layout import Layout
from forgather.ml.planner.fake_build import skips_blocks
from forgather.ml.strategy.data_parallel import DataParallel
from forgather.ml.strategy.fsdp2 import Sharded
from forgather.ml.trainer.model_setup import recompute_activations
from tests.ml.distributed import pipeline_runs
from tests.ml.distributed.gang import run_ranks
from tests.ml.moved_activations import moved_to_host
from tests.ml.strategy.equality import differences, environment, recipe_of, reference, train, windows
from tests.ml.strategy.models import Plain, batches, gpt2, llama

SETTINGS = {
    "full": {},
    "selective": {"mode": "selective"},
    "every second": {"every_n_layers": 2},
    "offloaded": {"offload": True},
    "selective, every second, offloaded": {"mode": "selective", "every_n_layers": 2, "offload": True},
}


class Products(TorchDispatchMode):
    """Counts matrix products and attention forwards."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[is_costly(func)] += 1
        return func(*args, **kwargs or {})


def step(make, settings):
    """Returns the gradients of a step, the bytes that the forward pass keeps, and the products of the backward pass."""
    torch.manual_seed(0)
    model = make()
    model.train()
    if settings is not None:
        recompute_activations(model, settings=settings)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    if isinstance(model, Plain):
        ids = torch.arange(8)[None]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(ids).square().mean()
    else:
        batch = batches(1)[0]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(**batch, use_cache=False).loss
    with Products() as products:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, sum(kept.values()), products.counts[True]


with_dropout = functools.partial(gpt2, layers=4, resid_pdrop=0.1, attn_pdrop=0.1)
four = functools.partial(llama, layers=4)


@pytest.mark.parametrize("make", [four, with_dropout, Plain])
def test_no_gradient_depends_on_what_is_recomputed(make):
    expected, whole, products = step(make, None)
    found = {name: step(make, settings) for name, settings in SETTINGS.items()}
    for gradients, _, _ in found.values():
        assert all(torch.equal(value, gradients[name]) for name, value in expected.items())
    if make is Plain:
        return
    # What is kept otherwise is not in the graph, or is recomputed.
    assert found["full"][1] < found["every second"][1] < whole
    assert found["selective"][2] == products < found["every second"][2] < found["full"][2]
    assert found["offloaded"][2] == found["full"][2]


@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "mm",
        "addmm",
        "bmm",
    ],
)
def test_products_and_the_attention_of_each_back_end_are_kept(name):
    assert is_costly(getattr(torch.ops.aten, name).default)
    assert is_costly(torch.ops.higher_order.flex_attention)


@pytest.mark.parametrize("name", ["mul.Tensor", "_scaled_dot_product_flash_attention_backward.default", "silu.default"])
def test_what_is_cheap_is_recomputed(name):
    packet, _, overload = name.partition(".")
    assert not is_costly(getattr(getattr(torch.ops.aten, packet), overload))


def test_what_a_layer_keeps_is_moved_to_the_host():
    with moved_to_host() as moved:
        step(four, {"offload": True})
    assert 4 == sum(size == 4 * 12 * 32 for size in moved)


class Whole(torch.nn.Module):
    """A model that recomputes itself as a whole, if it is told to."""

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs):
        self.settings = activation_checkpointing_kwargs


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"mode": "selective", "use_reentrant": True}, "FG725", "mode: selective and use_reentrant"),
        ({"mode": "selective", "context_fn": print}, "FG725", "mode: selective and context_fn"),
        ({"every_n_layers": 2}, "FG726", "has every_n_layers, and the layers of Whole"),
        ({"offload": True}, "FG726", "has offload, and the layers of Whole"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, code, words):
    with pytest.raises(TrainingError) as caught:
        recompute_activations(Whole(), settings=settings)
    assert code == caught.value.code and words in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "given", "codes"),
    [
        (TrainingArguments, {"mode": "selective", "use_reentrant": True}, ["FG725"]),
        (TrainingArguments, {"mode": "selective", "every_n_layers": 2}, []),
        (AccelTrainingArguments, {"mode": "selective"}, ["FG728"]),
        (AccelTrainingArguments, {"offload": True}, ["FG728"]),
        (AccelTrainingArguments, {"every_n_layers": 2}, []),
        (PipelineTrainingArguments, {"mode": "selective"}, ["FG727"]),
    ],
)
def test_the_check_finds_combinations_that_are_refused(arguments, given, codes):
    settings = {"output_dir": "out", "gradient_checkpointing": True, "gradient_checkpointing_kwargs": given}
    if arguments is AccelTrainingArguments:
        settings["deepspeed"] = {"zero_optimization": {"stage": 2}}
    if arguments is PipelineTrainingArguments:
        settings |= {"schedule_class": "ScheduleZBVZeroBubble", "per_device_train_batch_size": 8, "pipeline_chunks": 8}
    rules = arguments.RULES
    broken = [breach.code for breach in rules.broken(rules.complete(settings), given=settings)]
    assert codes == [code for code in broken if code in ("FG725", "FG727", "FG728")]


LAYOUTS = {
    "DDP": Layout(data_parallel_size=2),
    "FSDP2": Layout(data_parallel_size=2, shard_size=2),
    "tensor": Layout(tensor_parallel_size=2),
}


def in_parallel(name, made, groups):
    if name == "DDP":
        strategy = DataParallel(environment(), LAYOUTS[name], use_cpu=True)
    else:
        strategy = Sharded(environment(), LAYOUTS[name], use_cpu=True)
    strategy.build(made)
    strategy.build_optimizer()
    return (*train(strategy, groups), dict(strategy.export()))


@pytest.mark.matrix
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_recomputed_ranks_train_as_one_process_does(name, settings):
    prepare = [functools.partial(recompute_activations, settings=SETTINGS[settings])]
    made, groups = recipe_of(four, prepare=prepare), windows(2, updates=2)
    expected = reference(recipe_of(four), groups)
    found = run_ranks(2, in_parallel, name, made, groups)[0]
    off = differences(found, expected)
    assert max(off.values()) <= 1e-10, off


def in_stages(schedule, settings):
    prepare = [functools.partial(recompute_activations, settings=SETTINGS[settings])]
    made = pipeline_runs.recipe(pipeline_runs.make_llama, prepare=prepare)
    strategy = pipeline_runs.pipeline(made, world=2, rows=8, schedule_class=schedule, pipeline_chunks=4)
    found = pipeline_runs.train(strategy, pipeline_runs.windows(2, 2, 8))
    return (*found, pipeline_runs.weights_of(strategy))


@pytest.mark.matrix
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_recomputed_stages_train_as_one_process_does(schedule, settings):
    want = pipeline_runs.single_run(pipeline_runs.recipe(pipeline_runs.make_llama), pipeline_runs.windows(2, 2, 8))
    found = run_ranks(2, in_stages, schedule, settings)[0]
    off = pipeline_runs.differences(want, found)
    assert max(off.values()) <= 1e-10, off


@pytest.mark.matrix
@pytest.mark.parametrize("settings", ["full", "every second", "offloaded"])
def test_stages_of_a_divided_backward_pass_may_recompute_whole_blocks(settings):
    want = pipeline_runs.single_run(pipeline_runs.recipe(pipeline_runs.make_llama), pipeline_runs.windows(2, 2, 8))
    found = run_ranks(2, in_stages, "ScheduleZBVZeroBubble", settings)[0]
    off = pipeline_runs.differences(want, found)
    assert max(off.values()) <= 1e-10, off


def test_a_plan_does_not_shorten_a_model_of_which_some_layers_recompute():
    step = functools.partial(recompute_activations, settings={"every_n_layers": 2})
    assert skips_blocks(step)
    assert not skips_blocks(functools.partial(recompute_activations, settings={"mode": "selective"}))
    assert not skips_blocks(functools.partial(print, settings={"every_n_layers": 2}))
