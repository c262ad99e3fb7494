"""Replicas of a pipeline sum the gradients of a stage while other stages compute, and get the bits of one sum at the end."""

import functools
import hashlib

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forgather.ml.strategy.gradients import GradientSums
from tests.matrix import thinned
from tests.ml.distributed.cells import SCHEDULES as STAGES
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import (
    SCHEDULES,
    make_gpt2,
    make_tied_llama,
    pipeline,
    recipe,
    single_run,
    train,
    windows,
)

LOOP, V = "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"
ROWS = 8


def trained(make_model, schedule, overlaps):
    """Returns losses, norms, a digest of the weights of this rank, and what happened in the last micro-step."""
    layers = 2 * STAGES[schedule]
    made = recipe(functools.partial(make_model, layers=layers))
    settings = {"schedule_class": schedule, "pipeline_chunks": 4, "overlap_grad_reduce": overlaps}
    strategy = pipeline(made, world=4, data=2, rows=ROWS // 2, **settings)
    events = []
    if overlaps:
        sum_stage = strategy._sum_stage

        def noted(index):
            before = len(strategy._sums._started)
            sum_stage(index)
            complete = all(parameter.grad is not None for parameter in strategy._sums._started)
            events.append((index, len(strategy._sums._started) > before, complete))

        strategy._sum_stage = noted
    topology = strategy.topology
    found = train(strategy, windows(2, 2, ROWS, packed=True), dp_rank=topology.dp_rank, dp_size=topology.dp_size)
    bits = hashlib.sha256()
    for parameter in strategy.local.parameters():
        bits.update(parameter.detach().numpy().tobytes())
    return (*found, bits.hexdigest()), events, topology.pp_rank


def both(*args):
    return trained(*args, True), trained(*args, False)


@pytest.mark.parametrize(
    ("make_model", "schedule"),
    thinned(
        [(make, schedule) for make in (make_gpt2, make_tied_llama) for schedule in SCHEDULES],
        lambda make, schedule: (make, schedule) == (make_gpt2, V),
    ),
)
def test_sums_that_overlap_have_the_bits_of_sums_at_the_end(make_model, schedule):
    digests = {}
    for (new, events, pp_rank), (old, none, _) in run_ranks(4, both, make_model, schedule):
        assert old == new
        digests.setdefault(pp_rank, set()).add(new[2])
        # In each of two updates: once for a stage, in the last of two micro-steps.
        assert 2 * STAGES[schedule] == len(events) and [] == none
        assert all(complete for _, _, complete in events)
        # A weight that is tied to another stage of the rank waits for that stage.
        assert all(starts for _, starts, _ in events[STAGES[schedule] - 1 :: STAGES[schedule]])
    assert [1, 1] == [len(found) for found in digests.values()]


def make_qwen3():
    """A model whose norms of queries and keys are whole on every rank that slices its heads."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).double()


def of_sliced_replicas():
    found = []
    for overlaps in (True, False):
        settings = {"schedule_class": LOOP, "pipeline_chunks": 2, "overlap_grad_reduce": overlaps}
        strategy = pipeline(recipe(make_qwen3), world=4, data=2, tensor=2, rows=ROWS // 2, **settings)
        topology = strategy.topology
        found.append(train(strategy, windows(2, 1, ROWS), dp_rank=topology.dp_rank, dp_size=topology.dp_size))
    return found


def test_gradients_of_slices_are_summed_over_slices_and_replicas():
    _, norms, *_ = single_run(recipe(make_qwen3), windows(2, 1, ROWS))
    for ranks in run_ranks(4, of_sliced_replicas):
        for _, found in ranks:
            assert norms == pytest.approx(found, rel=1e-9)


class SumsTooEarly(GradientSums):
    """A negative control: sums the gradients of a stage without those of its last micro-batch."""

    def start(self, parameters):
        parameters = list(parameters)
        for parameter in parameters:
            parameter.grad *= 0.75
        super().start(parameters)


def too_early():
    made = recipe(functools.partial(make_gpt2, layers=4))
    found = []
    for kind in (GradientSums, SumsTooEarly):
        strategy = pipeline(made, world=4, data=2, rows=ROWS // 2, schedule_class=LOOP, pipeline_chunks=4)
        strategy._sums = kind(strategy.mesh.dp_group, strategy.topology.device)
        topology = strategy.topology
        found.append(train(strategy, windows(1, 1, ROWS), dp_rank=topology.dp_rank, dp_size=topology.dp_size)[1])
    return found


@pytest.mark.matrix
def test_a_comparison_would_find_gradients_that_are_summed_too_early():
    for right, wrong in run_ranks(4, too_early):
        assert abs(wrong[0] / right[0] - 1) > 1e-3


def sums_of_many(small_bytes):
    rank = torch.distributed.get_rank()
    weights = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(4)]
    weights[0].grad = torch.full((3, 2), 1.0 + rank)
    weights[1].grad = torch.arange(6.0).reshape(2, 3).t() + rank  # not contiguous
    weights[3].requires_grad_(False)
    sums = GradientSums(torch.distributed.group.WORLD, torch.device("cpu"), small_bytes=small_bytes)
    sums.start(weights)
    assert {*weights[:3]} == sums.finish()
    assert set() == sums.finish()
    return [None if weight.grad is None else weight.grad.tolist() for weight in weights]


@pytest.mark.parametrize("small_bytes", [0, 2**20])
def test_missing_and_strided_gradients_are_summed_and_frozen_weights_are_left_out(small_bytes):
    expected = [[[3.0, 3.0]] * 3, [[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]], [[0.0, 0.0]] * 3, None]
    assert [expected] * 2 == run_ranks(2, sums_of_many, small_bytes, start_group=True)
