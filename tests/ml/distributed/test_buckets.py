"""Replicas that resume: gradients are summed in the buckets, and so in the order, of the run that was left alone."""

import functools
import itertools
import logging
import os

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import TrainingArguments

from forgather.ml.losses import loss_rule
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.ddp_buckets import FixedBuckets
from forgather.ml.trainer.hf import HFTrainer
from forgather.ml.types import Window
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.states import give_state, state_of
from tests.ml.distributed.test_data_parallel import parallel, windows
from tests.ml.fixtures import rows, tiny_llama, weights
from tests.patience import patience

RANKS = 4  # sums of two numbers do not depend on their order
SETTINGS = {
    "default": {},
    "several buckets": {"ddp": {"bucket_cap_mb": 0.01}},
    "find unused": {"ddp": {"find_unused_parameters": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "views of buckets": {"ddp": {"gradient_as_bucket_view": True, "broadcast_buffers": None}},
    "half of the bits": {"ddp": {"comm_hook": DDPCommunicationHookType.FP16}},
    "each batch": {"sync_each_batch": True},
}


def _built(settings):
    return _built_of({**settings, "ddp": DistributedDataParallelKwargs(**settings.get("ddp", {}))}, tiny_llama)


def _built_of(settings, make_model):
    strategy = parallel(**settings)
    make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)  # noqa: E731
    strategy.build(Recipe(make_model=make_model, make_rule=loss_rule, make_optimizer=make_optimizer))
    strategy.build_optimizer()
    return strategy


def _trained(settings, accumulation, stop):
    """Returns the weights after all steps of a run that goes on in another strategy after `stop` steps."""
    strategy = _built(settings)
    for step, window in enumerate(windows(strategy.rule, strategy.topology.dp_rank, RANKS, accumulation)):
        if step == stop:
            state = state_of(strategy)
            strategy = _built(settings)
            give_state(strategy, state)
        strategy.forward_backward(window, denom=strategy.reduce(window.num_valid))
        strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: None, after_step=lambda: None)
    return {name: value.detach().clone() for name, value in strategy.model.state_dict().items()}


def _both(settings, accumulation, stop):
    alone = _trained(settings, accumulation, None)
    resumed = _trained(settings, accumulation, stop)
    return [name for name, value in alone.items() if not torch.equal(value, resumed[name])]


@pytest.mark.parametrize(
    ("name", "accumulation", "stop"),
    thinned(
        itertools.product(SETTINGS, (1, 3), (1, 2)),
        lambda *case: case in (("several buckets", 1, 2), ("views of buckets", 1, 2)),
    ),
)
def test_a_resumed_run_adds_gradients_in_the_same_order(name, accumulation, stop):
    assert [[]] * RANKS == run_ranks(RANKS, _both, SETTINGS[name], accumulation, stop)


class Normed(torch.nn.Module):
    """A model with means that checkpoints save, and a table that they do not save."""

    def __init__(self, saved=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(4, track_running_stats=saved)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return {"loss": (self.norm(x * self.table) - labels).square().mean()}


def _used_memory(saved, ddp):
    """Returns the storages of gradients, the broadcasts of three steps, the weights, and the means of the rank."""
    settings = {"ddp": DistributedDataParallelKwargs(**ddp)}
    strategy = _built_of(settings, functools.partial(Normed, saved))
    called = []
    synced = strategy.engine._sync_module_buffers
    strategy.engine._sync_module_buffers = lambda *args: called.append(1) or synced(*args)
    for step in range(3):
        generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        batch = {name: torch.randn(4, 4, generator=generator) for name in ("x", "labels")}
        window = Window(batches=[batch], num_valid=4, num_tokens=1, num_rows=4)
        strategy.forward_backward(window, denom=8)
        storages = {weight.grad.untyped_storage().data_ptr() for weight in strategy.model.parameters()}
        strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: None, after_step=lambda: None)
    means = strategy.model.norm.running_mean
    return len(storages), len(called), weights(strategy.model), None if means is None else means.clone()


def test_gradients_are_in_the_buckets_and_buffers_are_sent_only_if_checkpoints_save_them():
    default = {"gradient_as_bucket_view": True, "broadcast_buffers": None}
    for saved, sent in ((True, 3), (False, 0)):
        new, old = (run_ranks(2, _used_memory, saved, ddp) for ddp in (default, {}))
        assert [(1, sent)] * 2 == [found[:2] for found in new]
        assert [(8, 3)] * 2 == [found[:2] for found in old]
        for mine, before in zip(new, old, strict=True):
            assert all(torch.equal(value, before[2][name]) for name, value in mine[2].items())
            assert mine[3] is before[3] or torch.equal(mine[3], before[3])


def _events():
    model = tiny_llama()
    engine = FixedBuckets(model, bucket_cap_mb=0.01)
    seen = []
    engine.register_comm_hook(
        engine.process_group, lambda group, bucket: seen.append(bucket.index()) or allreduce_hook(group, bucket)
    )
    model.model.embed_tokens.weight.register_post_accumulate_grad_hook(lambda _: seen.append("last gradient"))
    ids = torch.stack([row["input_ids"] for row in rows(2)])
    for _ in range(2):
        engine(input_ids=ids, labels=ids).loss.backward()
    return seen


def test_buckets_are_reduced_during_each_backward_pass():
    for seen in run_ranks(2, _events, start_group=True):
        step, last = seen[: len(seen) // 2], len(seen) // 2 - 2
        assert [*range(last), "last gradient", last] == step == seen[len(step) :]
        assert last > 4


def _warnings():
    """Returns a list to which the warnings of this process are added."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("forgather").addHandler(handler)
    return found


def _with_error_feedback():
    found = _warnings()
    _both({"ddp": {"comm_hook": DDPCommunicationHookType.POWER_SGD}}, 1, 2)
    return found


@pytest.mark.matrix
def test_a_hook_whose_state_is_lost_is_named_at_the_resume():
    (message,) = run_ranks(RANKS, _with_error_feedback)[0]
    assert "comm_hook power_sgd" in message
    assert "will differ" in message


def _of_another_torch():
    del dist.Reducer._push_all_rebuilt_params
    found = _warnings()
    _trained({}, 1, None)
    return found


@pytest.mark.matrix
def test_a_torch_without_these_functions_trains_and_says_what_is_lost():
    (message,) = run_ranks(RANKS, _of_another_torch)[0]
    assert "makes the buckets of DistributedDataParallel again" in message
    assert "last digits" in message


def _with_unused_weights():
    def make_model():
        model = tiny_llama()
        model.model.layers[1].unused = torch.nn.Linear(2, 2)
        return model

    strategy = _built_of({}, make_model)
    before = weights(strategy.model)
    window = next(windows(strategy.rule, strategy.topology.dp_rank, 2, 1))
    strategy.forward_backward(window, denom=1)
    with pytest.raises(RuntimeError, match="did not receive grad") as caught:
        strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: None, after_step=lambda: None)
    assert all(torch.equal(before[name], value) for name, value in weights(strategy.model).items())
    return caught.value.__notes__


def test_unused_weights_are_named_before_gradients_that_no_rank_added_change_any():
    names = "model.layers.1.unused.bias, model.layers.1.unused.weight"
    note = f"weights without a gradient: {names}; ddp_find_unused_parameters: true allows them"
    assert [[note]] * 2 == run_ranks(2, _with_unused_weights)


def _by_transformers(folder, resume, settings):
    os.environ["OMP_NUM_THREADS"] = "1"  # as a launcher does; Accelerate would warn
    args = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=6,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
        ddp_timeout=patience(20),
        **settings,
    )
    trainer = HFTrainer(tiny_llama(), args, train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    return weights(trainer.model)


@pytest.mark.parametrize(
    "settings",
    thinned(
        [
            ({"ddp_find_unused_parameters": False},),
            ({"activation_checkpointing": True, "gradient_accumulation_steps": 2},),
            ({"ddp_find_unused_parameters": False, "ddp_static_graph": True, "gradient_accumulation_steps": 2},),
        ],
        lambda settings: False,
    ),
)
def test_a_resumed_run_of_transformers_adds_gradients_in_the_same_order(settings, tmp_path):
    alone = run_ranks(RANKS, _by_transformers, str(tmp_path), None, settings)
    resumed = run_ranks(RANKS, _by_transformers, str(tmp_path), str(tmp_path / "checkpoint-2"), settings)
    for expected, found in zip(alone, resumed, strict=True):
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
