"""The computed order of a shuffled epoch: a permutation that looks random, without memory, on any number of ranks."""

import math
import time
import tracemalloc
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from forgather.errors import CheckpointError, TrainingError
from forgather.ml import TrainingArguments
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.batch_sampler import RankBatchSampler, RankShare, epoch_seed
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.row_order import COMPUTED_RULE, LARGE, ComputedOrder, order_rule
from tests.ml.distributed.test_shares import ALONE, collate
from tests.ml.fixtures import tiny_llama
from tests.patience import patience

BILLION = 10**9


def sampler(rows, *, rank=0, of=1, size=2, rule=COMPUTED_RULE, drop_last=False):
    made = RankBatchSampler(rows, RankShare(size, rank, of), order=3, drop_last=drop_last, carry_seeds=False)
    made.order_rule = rule
    return made


def test_every_number_of_rows_has_a_permutation():
    for rows in (*range(1, 120), *range(120, 301, 7)):
        assert list(range(rows)) == sorted(ComputedOrder(rows, epoch_seed(5, rows))[0:rows])
    assert ComputedOrder(50, epoch_seed(5, 0))[0:50] != ComputedOrder(50, epoch_seed(5, 1))[0:50]


def test_a_large_permutation_is_one():
    rows = 100_003  # a prime, which no rectangle has as its area
    found = ComputedOrder(rows, 1).rows(np.arange(rows, dtype=np.uint64))
    assert rows == len(np.unique(found)) and rows - 1 == found.max()


def test_one_network_of_few_rounds_is_no_order(monkeypatch):
    # The measure below has to notice a bad order: half as few rounds leave neighbours together.
    assert abs(deviations(97, 250)) < 4
    monkeypatch.setattr("forgather.ml.trainer.row_order._ROUNDS", 4)
    assert deviations(97, 250) > 20


def deviations(rows, epochs):
    """Returns by how many standard deviations the differences of following rows are not uniform (chi-square)."""
    counts = np.zeros(rows)
    for epoch in range(epochs):
        order = np.array(ComputedOrder(rows, epoch_seed(7, epoch))[0:rows])
        counts += np.bincount((order[1:] - order[:-1]) % rows, minlength=rows)
    expected, freedom = epochs, rows - 2
    return (((counts[1:] - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_every_row_is_as_likely_at_every_position():
    rows, epochs = 31, 200
    counts = np.zeros((rows, rows))
    for epoch in range(epochs):
        counts[np.arange(rows), ComputedOrder(rows, epoch_seed(epoch % 3, epoch))[0:rows]] += 1
    expected, freedom = epochs / rows, (rows - 1) ** 2
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom) < 4


@pytest.mark.parametrize("start", [0, 6, 7])
def test_ranks_share_the_micro_batches_of_one_process(start):
    for rows in (1, 9, 24, 25, 203):
        if start >= rows:
            continue
        alone = sampler(rows, size=6)
        alone.set_position(epoch=1, start=start)
        expected = list(alone)
        ranks = [sampler(rows, rank=rank, of=3) for rank in range(3)]
        for one in ranks:
            one.set_position(epoch=1, start=start)
        found = []
        for number, parts in enumerate(zip(*ranks, strict=True)):
            first = start + number * 6
            kept = [part for one, part in zip(ranks, parts, strict=True) if not one.is_empty(first)]
            found.append([row for part in kept for row in part])
        assert expected == found
        order = ComputedOrder(rows, epoch_seed(3, 1))[start:]
        assert order == [row for batch in found for row in batch]


def test_a_billion_rows_have_a_first_row_at_once_and_no_list(record_property):
    tracemalloc.start()
    try:
        began = time.perf_counter()
        first = next(iter(sampler(BILLION, size=8)))
        seconds = time.perf_counter() - began
        many = [row for batch in islice(sampler(BILLION, size=8), 2000) for row in batch]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    record_property("peak_bytes", peak)
    record_property("first_seconds", seconds)
    assert first == many[:8] and len(set(many)) == 16_000
    assert seconds < patience(0.05) and peak < 8 * 2**20


def rows(number):
    return [{"input_ids": torch.tensor([1, row]), "labels": torch.tensor([1, row])} for row in range(number)]


def batches(tmp_path, *, number=24, of=1, batch_size=4, **given):
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=batch_size, use_cpu=True, seed=3, max_steps=9, **given
    )
    return TrainBatches(rows(number), args, collate, topology=replace(ALONE, dp_size=of))


def read(made):
    found = [window.batches[0]["input_ids"][:, 1].tolist() for window in made.windows(loss_rule(tiny_llama()))]
    return [row for batch in found for row in batch]


def test_the_setting_chooses_and_small_data_keeps_its_order(tmp_path):
    listed = torch.randperm(24, generator=torch.Generator().manual_seed(epoch_seed(3, 0))).tolist()
    assert listed == read(batches(tmp_path)) == read(batches(tmp_path, shuffle_order="listed"))
    assert ComputedOrder(24, epoch_seed(3, 0))[0:24] == read(batches(tmp_path, shuffle_order="computed"))
    assert "listed" == order_rule("auto", LARGE) and COMPUTED_RULE == order_rule("auto", LARGE + 1)


def test_a_resumed_run_keeps_the_order_that_its_checkpoint_names(tmp_path, monkeypatch):
    before = batches(tmp_path)
    before.row = 8
    state = before.state_dict()
    assert "listed" == state["order_rule"]
    of_earlier_release = {name: value for name, value in state.items() if name != "order_rule"}
    # As if the default had changed since: the data counts as large now.
    monkeypatch.setattr("forgather.ml.trainer.row_order.LARGE", 8)
    expected = torch.randperm(24, generator=torch.Generator().manual_seed(epoch_seed(3, 0))).tolist()[8:]
    for stored in (state, of_earlier_release):
        resumed = batches(tmp_path, batch_size=2)
        assert COMPUTED_RULE == resumed.state_dict()["order_rule"]
        resumed.load_state_dict(stored)
        assert expected == read(resumed)
    resumed = batches(tmp_path, shuffle_order="computed")
    with pytest.raises(CheckpointError, match="FG610.*order_rule listed, now computed 1"):
        resumed.load_state_dict(of_earlier_release)
    computed = batches(tmp_path, shuffle_order="computed")
    computed.row = 12
    again = batches(tmp_path, of=1, batch_size=3, shuffle_order="auto")
    again.load_state_dict(computed.state_dict())
    assert ComputedOrder(24, epoch_seed(3, 0))[12:] == read(again)
    with pytest.raises(CheckpointError, match="FG610.*order_rule computed 9, now computed 1"):
        batches(tmp_path).load_state_dict(computed.state_dict() | {"order_rule": "computed 9"})


def test_orders_that_leave_nothing_to_choose_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="FG778.*shuffle_order is 'computed', and train_sampling_strategy 'group"):
        batches(tmp_path, shuffle_order="computed", train_sampling_strategy="group_by_length")
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, shuffle_order="computed")
    with pytest.raises(TrainingError, match="FG778.*a data set without a length"):
        TrainBatches(iter(rows(4)), args, collate, topology=ALONE)


def test_the_order_of_transformers_stays_its_list(tmp_path):
    made = batches(tmp_path, train_sampling_strategy="transformers_random")
    made._own.take_order_rule(COMPUTED_RULE)
    assert torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist() == read(made)
    assert "listed" == made.state_dict()["order_rule"]
