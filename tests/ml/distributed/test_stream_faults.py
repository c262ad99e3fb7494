"""Streams of two ranks that are attacked: one sentence on every rank, or the numbers of one process, and never a hang."""

import json
import os
import signal

import pytest
import torch
from datasets import IterableDataset, load_dataset
from torch.utils.data import get_worker_info

from forgather.ml.data.row_stream import RowStream
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_row_dispatch import KINDS, LENGTHS, Counted, CountedReader
from tests.ml.fixtures import StopAt, tiny_llama


class Faulty(Counted):
    """Shards whose rows at some places are bad in some way: read, prepare, collate, or the worker that reads dies."""

    def __init__(self, faults, lengths=LENGTHS):
        super().__init__()
        self.faults, self.lengths = faults, lengths
        self.num_shards = len(lengths)

    def shard_size(self, shard):
        return self.lengths[shard]

    def open(self, shard, offset=None):
        return FaultyReader(self, shard, offset or 0)


class FaultyReader(CountedReader):
    def __next__(self):
        place = f"{self.shard}.{self.offset}"
        if self.offset == self.owner.lengths[self.shard]:
            raise StopIteration
        self.offset += 1
        fault = self.owner.faults.get(place)
        if fault == "read":
            raise ValueError(f"row {place} cannot be read")
        if fault == "dies" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        ids = torch.arange(8).add(7 * self.offset + 31 * self.shard).remainder(96)
        if fault == "columns":
            return {"other": ids}
        return {"input_ids": ids, "labels": ids, "is_bad": fault == "prepare"}


def checked(rows):
    for row in rows:
        if row.get("is_bad"):
            raise ValueError("a row cannot be prepared")
        yield row


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def run(folder, kind, rows, data, *, stop=None, **given):
    """Returns what a run raises, or the loss of each step and the number of bad rows."""
    torch.manual_seed(0)
    trainer_class, arguments, settings = KINDS[kind]
    try:
        args = arguments(
            str(folder / "out"),
            **{
                "per_device_train_batch_size": rows,
                "max_steps": 16,
                "data_streams": 1,
                "use_cpu": True,
                "save_strategy": "steps" if stop else "no",
                "save_steps": 1,
                "logging_steps": 1,
                "learning_rate": 1e-2,
                "report_to": "none",
                **settings,
                **given,
            },
        )
        model = tiny_llama(vocab_size=96, num_hidden_layers=1)
        callbacks = [StopAt(stop)] if stop else []
        trainer = trainer_class(model, args, train_dataset=data(), data_collator=collate, callbacks=callbacks)
        output = trainer.train(resume_from_checkpoint=given.get("resume_from_checkpoint"))
    except Exception as error:  # noqa: BLE001 - the test compares what each rank raises
        return f"{type(error).__name__}: {error}", None
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], output.metrics.get("bad_rows")


def of_rank(folder, kind, rows, data, options):
    return run(folder, kind, rows, data, **options)


def on_ranks(count, folder, rows, data, kind="DDP", **options):
    return run_ranks(count, of_rank, folder, kind, rows, data, options, timeout=30)


def no_rows():
    return IterableDataset.from_generator(lambda: iter(())).filter(lambda row: False)


def one_row():
    return RowStream.of_shards(Faulty({}, (1,)), buffer_size=0, seed=3)


def other_columns():
    return RowStream.of_shards(Faulty({"1.20": "columns"}), buffer_size=0, seed=3)


def dying_worker():
    return RowStream.of_shards(Faulty({"1.20": "dies"}), buffer_size=0, seed=3)


def test_a_stream_without_rows_is_refused_on_every_rank(tmp_path):
    for found, _ in on_ranks(2, tmp_path, 2, no_rows):
        print(found)
        assert "FG803" in found


def test_one_row(tmp_path):
    expected, _ = run(tmp_path, "single", 4, one_row, max_steps=3)
    for found, _ in on_ranks(2, tmp_path, 2, one_row, max_steps=3):
        assert expected == pytest.approx(found, rel=2e-5)


def test_cols(tmp_path):
    for found, _ in on_ranks(2, tmp_path, 2, other_columns):
        print(found)
    expected, bad = run(tmp_path, "single", 4, other_columns, bad_rows="skip", max_steps=22)
    print(bad)
    for found, count in on_ranks(2, tmp_path, 2, other_columns, bad_rows="skip", max_steps=22):
        assert expected == pytest.approx(found, rel=2e-5)
        assert bad == count
    assert 0


def test_dies(tmp_path):
    for found, _ in on_ranks(2, tmp_path, 2, dying_worker, dataloader_num_workers=1):
        print(found)
    assert 0
