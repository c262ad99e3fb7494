"""Data parallelism over Accelerate: equal to one process, to the last digits of float64."""

import itertools
import os
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import DistributedError
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.losses import loss_rule
from forgather.ml.strategy import data_parallel
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.data_parallel import (
    DataParallel,
    check_engine,
    make_accelerator,
    sum_bucket_async,
)
from forgather.ml.strategy.single import SingleDevice
from forgather.ml.trainer.model_setup import recompute_activations
from forgather.ml.types import Window
from tests.matrix import thinned
from tests.ml.distributed.gang import import_compiler, run_ranks
from tests.ml.distributed.states import give_state, state_of
from tests.ml.fixtures import VOCAB, rows, tiny_llama
from tests.patience import patience

STEPS = 6
ROWS = 4  # of all ranks, in one micro-step


def tiny_gpt2(**config):
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(
        GPT2Config(**settings, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True, **config)
    )


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}


def environment():
    return DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))


def single():
    return SingleDevice(DistributedEnvironment(), use_cpu=True)


def parallel(**settings):
    env = environment()
    return DataParallel(env, Layout.for_world(env.world_size), use_cpu=True, **settings)


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def windows(rule, dp_rank, dp_size, accumulation):
    """Micro-steps of ROWS rows, rank by rank; the last update has one micro-step, half of it rows without targets."""
    data = rows(count=ROWS * accumulation * STEPS, seed=3)
    share = ROWS // dp_size
    for step in range(STEPS):
        micro_steps = accumulation if step != STEPS - 1 else 1
        batches = []
        for micro in range(micro_steps):
            whole = [dict(row) for row in data[(step * accumulation + micro) * ROWS :][:ROWS]]
            if step == STEPS - 1:
                for row in whole[ROWS // 2 :]:
                    row["labels"] = torch.full_like(row["labels"], -100)
            batches.append(batch_of(whole[dp_rank * share : (dp_rank + 1) * share]))
        yield Window(batches, sum(rule.count(batch) for batch in batches), 0, 0)


def trained(strategy, *, model="llama", accumulation=1, dtype=torch.float64, autocast=None, wrong=None, **recipe):
    """Returns losses, norms and weights of STEPS updates."""
    make = MODELS[model]
    strategy.build(
        Recipe(
            make_model=lambda: make().to(dtype),
            make_rule=loss_rule,
            make_optimizer=lambda trained: torch.optim.AdamW(trained.parameters(), lr=1e-3),
            autocast=autocast,
            model_is_made_anew=True,
            **recipe,
        )
    )
    strategy.build_optimizer()
    top = strategy.topology
    losses, norms = [], []
    for window in windows(strategy.rule, top.dp_rank, top.dp_size, accumulation):
        denom = strategy.reduce(window.num_valid)
        if wrong == "mean of means":
            denom = window.num_valid * top.dp_size
        if wrong == "dropped" and top.rank == 1:
            denom = float("inf")
        losses.append(float(strategy.reduce(strategy.forward_backward(window, denom=denom))))
        if wrong == "doubled":
            for parameter in strategy.model.parameters():
                parameter.grad *= 2
        update = strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: None, after_step=lambda: None)
        norms.append(float(update.grad_norm))
    weights = {name: value.detach().clone() for name, value in strategy.model.state_dict().items()}
    return losses, norms, weights


def in_parallel(options, settings=None):
    return trained(parallel(**(settings or {})), **options)


def distance(expected, actual, start):
    """Returns how far losses, norms (relative) and weights (relative to how far they moved) differ."""
    losses, norms = (
        max(abs(a - b) / abs(a) for a, b in zip(expected[kind], actual[kind], strict=True)) for kind in (0, 1)
    )
    moved = apart = 0.0
    for name, value in expected[2].items():
        moved += float((value - start[name]).square().sum())
        apart += float((value - actual[2][name]).square().sum())
    return {"loss": losses, "grad_norm": norms, "updrel": (apart / moved) ** 0.5}


def start_of(model):
    return {name: value.double() for name, value in MODELS[model]().state_dict().items()}


@pytest.mark.parametrize(
    ("world_size", "accumulation", "model"),
    thinned(itertools.product([2, 4], [1, 3], sorted(MODELS)), lambda *case: case in ((2, 3, "gpt2"), (4, 1, "llama"))),
)
def test_ranks_equal_one_process(world_size, accumulation, model):
    options = {"model": model, "accumulation": accumulation}
    expected = trained(single(), **options)
    for actual in run_ranks(world_size, in_parallel, options):
        found = distance(expected, actual, start_of(model))
        assert {name: value for name, value in found.items() if value > 1e-10} == {}


@pytest.mark.parametrize("model", thinned(sorted(MODELS), lambda model: model == "llama"))
def test_a_number_of_ranks_other_than_a_power_of_two_loses_no_precision(model, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 6)
    options = {"model": model, "accumulation": 2}
    expected = trained(single(), **options)
    for actual in run_ranks(3, in_parallel, options):
        found = distance(expected, actual, start_of(model))
        assert {name: value for name, value in found.items() if value > 1e-10} == {}


def _with_hook(options):
    return trained(parallel(ddp=DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)), **options)


def test_gradients_that_travel_in_half_of_the_bits_are_added_too():
    options = {"accumulation": 3}
    expected = trained(single(), **options)
    found = distance(expected, run_ranks(2, _with_hook, options)[1], start_of("llama"))
    assert 1e-10 < found["grad_norm"] < 1e-2


OPTIONS = {
    "static graph": {"ddp": {"static_graph": True}},
    "find unused": {"ddp": {"find_unused_parameters": True}},
    "views of buckets": {"ddp": {"gradient_as_bucket_view": True}},
    "small buckets": {"ddp": {"bucket_cap_mb": 1}},
    "no buffers": {"ddp": {"broadcast_buffers": False}},
    "each batch": {"sync_each_batch": True},
}


def _with_options(options, settings):
    ddp = DistributedDataParallelKwargs(**settings.get("ddp", {}))
    return trained(parallel(ddp=ddp, sync_each_batch=settings.get("sync_each_batch", False)), **options)


@pytest.mark.parametrize(
    "name", thinned(sorted(OPTIONS), lambda name: name in ("static graph", "views of buckets", "each batch"))
)
def test_options_change_no_result(name):
    options = {"accumulation": 3}
    expected = trained(single(), **options)
    actual = run_ranks(2, _with_options, options, OPTIONS[name])[1]
    assert max(distance(expected, actual, start_of("llama")).values()) <= 1e-10


def _recomputed(accumulation):
    return trained(parallel(), accumulation=accumulation, prepare=[partial(recompute_activations, settings={})])


def test_recomputed_activations_change_no_result():
    expected = trained(single(), accumulation=3)
    actual = run_ranks(2, _recomputed, 3)[1]
    assert max(distance(expected, actual, start_of("llama")).values()) <= 1e-10


def _compiled(accumulation):
    return trained(parallel(), accumulation=accumulation, prepare=[lambda m: m.compile(backend="aot_eager")])


@pytest.mark.matrix
def test_compiled_replicas_equal_one_process():
    import_compiler()
    expected = trained(single(), accumulation=3)
    actual = run_ranks(2, _compiled, 3)[1]
    assert max(distance(expected, actual, start_of("llama")).values()) <= 1e-10


def _half(dtype):
    strategy = parallel() if DistributedEnvironment().world_size > 1 else single()
    return trained(strategy, accumulation=3, dtype=torch.float32, autocast=dtype)


def test_bfloat16_replicas_are_close_to_one_process():
    expected = _half(torch.bfloat16)
    actual = run_ranks(2, _half, torch.bfloat16)[1]
    found = distance(expected, actual, {name: value.float() for name, value in start_of("llama").items()})
    assert found["loss"] < 1e-3
    assert found["grad_norm"] < 1e-2


def _overflows_once():
    strategy = parallel(scaling={"init_scale": 2.0**10})
    strategy.build(
        Recipe(
            make_model=tiny_llama,
            make_rule=loss_rule,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            autocast=torch.float16,
        )
    )
    strategy.build_optimizer()
    before = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    found = []
    for factor, window in zip((1e-30, 1.0), windows(strategy.rule, strategy.topology.dp_rank, 2, 1), strict=False):
        # One rank alone overflows; all must leave the update out.
        divisor = factor if strategy.topology.rank == 1 else 1.0
        strategy.forward_backward(window, denom=window.num_valid * 2 * divisor)
        heard = []
        update = strategy.update(
            max_norm=1.0, want_norm=True, before_step=heard.append, after_step=partial(heard.append, "stepped")
        )
        same = all(torch.equal(before[name], value) for name, value in strategy.model.state_dict().items())
        found.append((update.skipped, same, len(heard), strategy.capture().optimizer["scaler"]["scale"]))
    return found


def test_an_overflow_on_one_rank_leaves_the_update_out_on_all():
    for found in run_ranks(2, _overflows_once):
        assert [(True, True, 0, 2.0**9), (False, False, 2, 2.0**9)] == found


def _resumed(state):
    strategy = parallel()
    options = {"make_rule": loss_rule, "make_optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)}
    strategy.build(Recipe(make_model=lambda: tiny_llama(seed=9).double(), **options))
    strategy.build_optimizer()
    give_state(strategy, state)
    return state_of(strategy), dict(strategy.export())


def test_what_one_process_kept_several_go_on_from():
    strategy = single()
    trained(strategy)
    kept = state_of(strategy)
    for state, exported in run_ranks(2, _resumed, kept):
        assert all(torch.equal(kept["model"][name], exported[name]) for name in exported)
        assert kept["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
        for name, values in kept["optimizer"]["state"].items():
            assert all(torch.equal(values[key], state["optimizer"]["state"][name][key]) for key in values)


def _counts_reductions(accumulation):
    handed, seen = [], []

    def count(gradients, group):
        handed.append(len(seen))
        return sum_bucket_async(gradients, group)

    data_parallel.sum_bucket_async = count  # in this process alone, which ends with the test
    strategy = parallel()
    strategy.build(Recipe(make_model=tiny_llama, make_rule=loss_rule, make_optimizer=None))
    window = next(windows(strategy.rule, 0, 2, accumulation))
    strategy.forward_backward(window, denom=1, after_micro_batch=lambda: seen.append(1))
    return handed


def test_gradients_are_added_with_the_last_micro_batch_alone():
    for handed in run_ranks(2, _counts_reductions, 3):
        assert {2} == set(handed)


# The bench of test_cells.py has all three in every run of the suite.
@pytest.mark.parametrize("wrong", thinned(["mean of means", "doubled", "dropped"], lambda wrong: wrong == "dropped"))
def test_what_is_wrong_is_seen(wrong):
    options = {"accumulation": 3}
    expected = trained(single(), **options)
    actual = run_ranks(2, in_parallel, {**options, "wrong": wrong})[0]
    found = distance(expected, actual, start_of("llama"))
    assert found["grad_norm"] > 1e-3
    # AdamW after clipping does not feel a factor: the norm alone shows it.
    assert (wrong != "doubled") == (found["updrel"] > 1e-3)


def _tries_to_train_alone(variables):
    os.environ |= variables
    parallel()
    dist.barrier()  # the first rank keeps the store, and must not leave before the others have met


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION"])
def test_variables_of_accelerate_do_not_choose(variable):
    run_ranks(2, _tries_to_train_alone, {variable: "bf16" if variable.endswith("PRECISION") else "true"})


def test_an_accelerator_that_became_something_else_is_refused():
    accelerator = make_accelerator(torch.device("cpu"), 1, DistributedDataParallelKwargs())
    with pytest.raises(DistributedError, match="runs 1 process.*asks for 2") as caught:
        check_engine(accelerator, torch.device("cpu"), 2)
    assert caught.value.code == "FG722"
