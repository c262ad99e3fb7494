"""Activations on the host: no bit of a gradient depends on it, a storage is moved once, and weights are not moved."""

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from forgather.ml import AccelTrainingArguments, TrainingArguments
from forgather.ml.activation_offloading import host_memory, saved_on_device, saved_on_host
from forgather.ml.trainer.model_setup import recompute_activations
from tests.ml.moved_activations import moved_to_host
from tests.ml.strategy.models import batches, gpt2, llama

MODELS = {
    "llama": functools.partial(llama, layers=3),
    "gpt2": functools.partial(gpt2, layers=2),
    "gpt2 with dropout": functools.partial(gpt2, layers=3, resid_pdrop=0.1, attn_pdrop=0.1),
}
RECOMPUTED = {
    "kept": None,
    "recomputed": {},
    "selective": {"mode": "selective"},
    "re-entrant": {"use_reentrant": True},
    "inputs offloaded": {"offload": True},
}


def step(make, around, *, settings=None, half=False):
    """Returns the gradients of a step, and the elements of each storage that was moved."""
    torch.manual_seed(0)
    model = make()
    model.train()
    if settings is not None:
        recompute_activations(model, settings=settings)
    torch.manual_seed(1)
    with moved_to_host() as moved:
        with torch.autocast("cpu", torch.bfloat16, enabled=half), around:
            loss = model(**batches(1)[0], use_cache=False).loss
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, moved


def saved_bytes(make):
    """Returns the bytes of the storages that autograd saves and that are no weights, at least 1 KiB each."""
    torch.manual_seed(0)
    model, sizes = make(), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() >= 1024 and storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batches(1)[0], use_cache=False).loss
    del loss
    return sum(sizes.values())


@pytest.mark.parametrize(("name", "half"), [*((name, False) for name in RECOMPUTED), ("kept", True)])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_bit_of_a_gradient_depends_on_where_activations_are(make, name, half):
    settings = RECOMPUTED[name]
    expected, _ = step(make, contextlib.nullcontext(), settings=settings, half=half)
    found, moved = step(make, saved_on_host(), settings=settings, half=half)
    assert moved
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_all_that_is_saved_is_moved_once(make):
    _, moved = step(make, saved_on_host())
    itemsize = next(make().parameters()).element_size()
    whole = saved_bytes(make)
    # Some storages hold integers.
    assert 0.95 * whole <= itemsize * sum(moved) <= 1.1 * whole
    # With recomputation, what the layers keep is not among it.
    _, inputs = step(make, saved_on_host(), settings={})
    assert sum(inputs) < sum(moved) / 3


def test_a_block_of_the_forward_pass_can_stay():
    weight = torch.ones(64, 64, requires_grad=True)
    with moved_to_host() as moved, saved_on_host():
        first = weight.exp()
        with saved_on_device():
            second = first.sin()
        second.exp()
    assert [64 * 64] * 2 == moved


def test_a_tensor_that_stays_and_is_changed_in_place_is_refused_as_by_autograd():
    small, weight = torch.ones(4), torch.ones(4, requires_grad=True)
    with saved_on_host():
        product = (small * weight).sum()
    small.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_moved_tensor_has_the_values_with_which_the_forward_pass_computed():
    given, weight = torch.full((512,), 2.0), torch.ones(512, requires_grad=True)
    with moved_to_host(), saved_on_host():
        first = given * weight
        given.add_(1)
        second = given * weight
    (first.sum() + second.sum()).backward()
    assert torch.equal(torch.full((512,), 5.0), weight.grad)


def test_a_graph_that_is_dropped_leaves_nothing():
    gc.collect()
    gc.disable()
    try:
        for size in (4, 512):
            weight = torch.ones(size, requires_grad=True)
            with moved_to_host(), saved_on_host():
                result = weight.exp()
            storage = weakref.ref(result.untyped_storage())
            del result
            assert storage() is None
    finally:
        gc.enable()


def test_a_backward_pass_inside_frees_what_it_has_used():
    # As in a pipeline, where the passes of micro-batches alternate.
    held = []

    def allocated(count, dtype):
        held.append(weakref.ref(made := torch.empty(count, dtype=dtype)))
        return made

    weight = torch.ones(512, requires_grad=True)
    token = host_memory.set(allocated)
    try:
        with saved_on_host():
            for number in range(3):
                (weight * 1).sin().exp().sum().backward()
                assert 2 * (number + 1) == len(held)
                assert not any(one() is not None for one in held)
    finally:
        host_memory.reset(token)


class Stream:
    """The calls of a stream of torch that copies make."""

    def __init__(self, log, name):
        self.log, self.name, self.count = log, name, 0

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *error):
        pass

    def record_event(self):
        self.count += 1
        self.log.append(f"{self.name} {self.count}")
        return f"{self.name} {self.count}"

    def wait_stream(self, stream):
        self.log.append(f"{self.name} waits for all of {stream.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_copies_are_ordered_with_the_stream_of_the_model(monkeypatch):
    log = []
    main, sides = Stream(log, "main"), iter([Stream(log, "out"), Stream(log, "in")])

    class Streams:
        Stream = staticmethod(lambda device: next(sides))
        accelerator = SimpleNamespace(current_stream=lambda device: main)

    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"kept for {stream.name}"))
    weight = torch.nn.Parameter(torch.ones(512))
    with moved_to_host() as moved, saved_on_host(streams=Streams):
        result = weight
        for _ in range(7):
            result = result.sin()
        out = [*log]
        log.clear()
    # Of seven inputs, the first one is a weight. Five copies may be on their way; then the model's stream waits for the oldest.
    assert [512] * 6 == moved
    one = "out waits for all of main, on out, out {}"
    assert ", ".join(map(one.format, range(1, 7))) + ", main waits for out 1" == ", ".join(out)
    assert [f"main waits for out {number}" for number in range(2, 7)] == log
    log.clear()
    result.sum().backward()
    fetch = "in waits for all of main, in waits for out {}, on in, in {}, kept for in"
    first, *others = [fetch.format(7 - number, number) for number in range(1, 7)]
    expected = [first, "main waits for in 1", others[0], others[1]]
    for number in range(2, 7):
        expected += [f"main waits for in {number}", *others[number : number + 1]]
    assert ", ".join(expected) == ", ".join(log)
    value = torch.ones(512, requires_grad=True)
    plain = functools.reduce(lambda one, _: one.sin(), range(7), value)
    plain.sum().backward()
    assert torch.equal(value.grad, weight.grad)


def test_the_check_refuses_it_under_deepspeed():
    settings = {"output_dir": "out", "activation_offloading": True}
    for arguments, more, codes in (
        (TrainingArguments, {}, []),
        (AccelTrainingArguments, {"fsdp": "full_shard"}, []),
        (AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 2}}}, ["FG728"]),
    ):
        rules, given = arguments.RULES, {**settings, **more}
        broken = [breach.code for breach in rules.broken(rules.complete(given), given=given)]
        assert codes == [code for code in broken if code == "FG728"]
