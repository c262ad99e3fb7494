"""Rows grouped by length: less padding, the same order on all ranks and after a resume, each row once."""

import random
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset

from forgather.errors import CheckpointError, TrainingError
from forgather.ml import TrainingArguments
from forgather.ml.data import CausalLMCollator
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.types import PaddingBatch
from tests.ml.distributed.test_shares import ALONE
from tests.ml.fixtures import tiny_llama

ROWS = 203


def rows():
    """Rows whose second token is their number, so that it can be read from a batch."""
    draw = random.Random(1)
    return [{"input_ids": [1, number, *[2] * draw.randint(0, 60)]} for number in range(ROWS)]


def batches(tmp_path, *, data=None, rank=0, of=1, batch_size=4, **given):
    given = {"train_sampling_strategy": "group_by_length", "seed": 3, "max_steps": 500, **given}
    args = TrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=batch_size, **given)
    topology = replace(ALONE, rank=rank, dp_rank=rank, dp_size=of)
    return TrainBatches(rows() if data is None else data, args, CausalLMCollator(), topology=topology)


def numbers(window):
    kept = [batch for batch in window.batches if not isinstance(batch, PaddingBatch)]
    return [batch["input_ids"][:, 1].tolist() for batch in kept]


def epoch(made):
    return [numbers(window) for window in made.windows(loss_rule(tiny_llama()))]


def flat(read):
    return [number for window in read for batch in window for number in batch]


def padding(read, batch_size=4):
    """Returns the share of padding in batches of these rows."""
    lengths = [len(row["input_ids"]) for row in rows()]
    order = flat(read)
    parts = [[lengths[one] for one in order[at : at + batch_size]] for at in range(0, len(order), batch_size)]
    return 1 - sum(map(sum, parts)) / sum(max(part) * len(part) for part in parts)


def test_each_row_is_read_once_and_batches_have_little_padding(tmp_path):
    grouped, shuffled = (
        epoch(batches(tmp_path, train_sampling_strategy=name)) for name in ("group_by_length", "random")
    )
    assert sorted(flat(grouped)) == sorted(flat(shuffled)) == list(range(ROWS))
    # The negative control: at random, a third is padding.
    assert padding(grouped) < 0.1 and padding(shuffled) > 0.3
    # The order is a new one in each epoch and for each seed, and does not depend on the kind of data set.
    made = batches(tmp_path)
    first, _ = epoch(made), made.next_epoch()
    assert first == grouped == epoch(batches(tmp_path, data=Dataset.from_list(rows()))) != epoch(made)
    assert first != epoch(batches(tmp_path, seed=4))
    state = torch.get_rng_state()
    batches(tmp_path)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("of", [2, 4])
def test_all_ranks_have_the_order_of_one_process(of, tmp_path):
    one = epoch(batches(tmp_path, batch_size=8))
    ranks = [epoch(batches(tmp_path, rank=rank, of=of, batch_size=8 // of)) for rank in range(of)]
    for number, window in enumerate(one):
        assert flat([window]) == [row for rank in ranks for row in flat(rank[number : number + 1])]


def test_a_resumed_epoch_continues_in_the_same_order_also_with_more_ranks(tmp_path):
    whole = epoch(batches(tmp_path, batch_size=4, gradient_accumulation_steps=2))
    made = batches(tmp_path, batch_size=4, gradient_accumulation_steps=2)
    for _, window in zip(range(7), made.windows(loss_rule(tiny_llama())), strict=False):
        made.advance(window)
    for of, batch_size in ((1, 4), (2, 2)):
        left = []
        for rank in range(of):
            again = batches(tmp_path, rank=rank, of=of, batch_size=batch_size, gradient_accumulation_steps=2)
            again.load_state_dict(made.state_dict())
            left.append(epoch(again))
        assert sorted(flat(whole[7:])) == sorted(row for rank in left for row in flat(rank))
        assert sorted(flat(whole[7:8])) == sorted(row for rank in left for row in flat(rank[:1]))


@pytest.mark.parametrize(("before", "now"), [("group_by_length", "random"), ("random", "group_by_length")])
def test_another_order_or_size_of_steps_is_a_change_of_the_data(before, now, tmp_path):
    made = batches(tmp_path, train_sampling_strategy=before)
    made.row = 8
    state = made.state_dict()
    state.pop("group_rows") if before == "random" else None  # as earlier releases wrote it
    with pytest.raises(CheckpointError, match="group_rows") as error:
        batches(tmp_path, train_sampling_strategy=now).load_state_dict(state)
    assert "FG610" == error.value.code
    if before == "group_by_length":
        with pytest.raises(CheckpointError, match="group_rows 4, now 8"):
            batches(tmp_path, batch_size=8).load_state_dict(state)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


@pytest.mark.parametrize(
    ("data", "message"), [(Stream(), "read in its own order"), ([{"x": [1.0]}] * 4, "row 0 has no tokens")]
)
def test_rows_without_a_length_are_refused(data, message, tmp_path):
    with pytest.raises(TrainingError, match=message) as error:
        batches(tmp_path, data=data)
    assert ("FG946", "args.train_sampling_strategy") == (error.value.code, error.value.argument)
