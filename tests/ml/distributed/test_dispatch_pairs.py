"""Rows that one process reads for several replicas, with preferences, packing and bad rows: the steps of one process."""

import functools
import os

import pytest
import torch

from forgather.ml import AccelTrainer, Trainer, TrainingArguments
from forgather.ml.data import PreferenceCollator
from forgather.ml.data.block_packer import BlockPacker
from forgather.ml.data.row_stream import RowStream
from forgather.ml.preference_losses import ORPOLoss
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_row_dispatch import Counted
from tests.ml.fixtures import tiny_llama


def as_pairs(rows):
    for row in rows:
        ids = row["input_ids"].tolist()
        yield {"prompt_ids": ids[:3], "chosen_ids": ids[3:7], "rejected_ids": ids[:1:-2]}


def stacked(rows):
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def tokens(stream):
    return stream, stacked, None


def packed(stream):
    columns = ("input_ids", "labels", "position_ids")
    return stream.packed(functools.partial(BlockPacker, 12, 0), columns), stacked, None


def preferences(stream):
    return stream.prepared(as_pairs, ("prompt_ids", "chosen_ids", "rejected_ids")), PreferenceCollator(), ORPOLoss()


DATA = {"tokens": tokens, "packed": packed, "preferences": preferences}
SKIPPING = {"bad_rows": "skip"}


def trained(folder, data, bad, settings):
    """Returns the loss of each step, the number of rows left out, and the number of rows that this process read."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    kind, arguments = (Trainer, TrainingArguments) if ranks == 1 else (AccelTrainer, AccelTrainingArguments)
    torch.manual_seed(0)
    shards = Counted(bad)
    stream, collate, loss = DATA[data](RowStream.of_shards(shards, buffer_size=16, seed=3))
    shards.num_read = 0
    args = arguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=8 // ranks,
        max_steps=7,
        data_streams=1,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-2,
        **settings,
    )
    model = tiny_llama(vocab_size=96, num_hidden_layers=2)
    trainer = kind(model, args, train_dataset=stream, data_collator=collate, loss_fn=loss)
    output = trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, output.metrics.get("bad_rows", 0), shards.num_read


CASES = [
    (data, has_bad, workers)
    for data in DATA
    for has_bad in (False, True)
    for workers in (0, 1)
    if (data, has_bad, workers) != ("tokens", False, 0)
]
QUICK = (("preferences", False, 0), ("packed", True, 1))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("data", "has_bad", "workers"), thinned(CASES, lambda *case: case in QUICK))
def test_rows_that_are_dealt_out_give_the_steps_of_one_process(tmp_path, data, has_bad, workers):
    bad, settings = ((1, 3), SKIPPING) if has_bad else (None, {})
    (alone,) = run_ranks(1, trained, tmp_path, data, bad, {**settings})
    found = run_ranks(2, trained, tmp_path, data, bad, {**settings, "dataloader_num_workers": workers})
    for losses, num_bad, num_read in found:
        assert alone[0] == pytest.approx(losses, rel=2e-5)
        assert (alone[1], has_bad) == (num_bad, num_bad == 1)
        # Rows that a worker reads are counted there.
        assert workers or num_read in (0, alone[2])
    assert abs(alone[0][0] - alone[0][-1]) > 1e-3
    assert workers or {0, alone[2]} == {read for _, _, read in found}
