"""Streams of two ranks that are attacked: one sentence on every rank, or the numbers of one process, never a hang."""

import functools
import logging
import os
import re
import signal

import pytest
import torch
from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchRows
from torch.utils.data import get_worker_info

from forgather.ml.data.row_stream import RowStream
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_row_dispatch import KINDS, LENGTHS, Counted, CountedReader, collate
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


FAULTS = {
    "0.3": "read",
    "0.30": "prepare",
    "0.36": "read",
    "1.2": "columns",
    "1.3": "read",
    "1.28": "prepare",
    "2.0": "read",
    "2.27": "columns",
    "2.28": "read",
}


def no_rows():
    return IterableDataset.from_generator(lambda: iter(())).filter(lambda row: False)


def one_row():
    return RowStream.of_shards(Faulty({}, (1,)), buffer_size=0, seed=3)


def other_columns():
    return RowStream.of_shards(Faulty({"1.20": "columns"}), buffer_size=0, seed=3)


def dying_worker():
    return RowStream.of_shards(Faulty({"1.20": "dies"}), buffer_size=0, seed=3)


def bad_rows():
    rows = RowStream.of_shards(Faulty(FAULTS), buffer_size=16, seed=3)
    return rows.prepared(checked, ["input_ids", "labels"])


CASES = [
    (no_rows, {}, ["FG803", "FG803"]),
    (other_columns, {}, ["FG729.*columns 'other', .*have 'input_ids', .*'labels'", "FG729"]),
    # Without rows that are dealt out, too.
    (other_columns, {"dispatch_rows": False}, ["FG729", "FG729"]),
    (dying_worker, {"dataloader_num_workers": 1}, ["DataLoader worker .* is killed", "FG854.*rank 0 .* is killed"]),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("data", "options", "expected"), thinned(CASES, lambda data, options, _: data is other_columns and not options)
)
def test_every_rank_raises_one_sentence(tmp_path, data, options, expected):
    found = [error for error, _ in on_ranks(2, tmp_path, 2, data, max_steps=22, **options)]
    for pattern, error in zip(expected, found, strict=True):
        assert re.search(pattern, str(error)), found


@pytest.mark.matrix
def test_one_row_is_an_epoch(tmp_path):
    expected, _ = run(tmp_path, "single", 4, one_row, max_steps=3)
    for found, _ in on_ranks(2, tmp_path, 2, one_row, max_steps=3):
        assert expected == pytest.approx(found, rel=2e-5)


# In the middle of an epoch, at its end, and in the next one.
STEPS = [5, 12, 14]
RUNS = [
    ("single", 1, {"dataloader_num_workers": 2}, {}),
    ("DDP", 2, {"dataloader_num_workers": 1}, {}),
    ("DDP", 2, {}, {"dataloader_num_workers": 1}),
    ("single", 1, {"dataloader_num_workers": 2}, {"dataloader_num_workers": 1}),
    ("DDP", 2, {"dispatch_rows": False}, {}),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("steps", thinned(STEPS, lambda steps: steps == 5))
@pytest.mark.parametrize("streams", [1, pytest.param(3, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("kind", "ranks", "options", "first"), thinned(RUNS, lambda kind, *_: kind == "single"))
def test_bad_rows_of_every_kind_are_counted_exactly(tmp_path, steps, streams, kind, ranks, options, first):
    """With workers that read ahead, rows that are dealt out, and resumes: the number is that of one process."""
    options = options | {"bad_rows": "skip", "data_streams": streams, "max_steps": steps}
    expected, count = run(tmp_path / "one", "single", 8, bad_rows, **options | {"dataloader_num_workers": 0})
    assert count > 0
    if first:
        run(tmp_path, "single", 8, bad_rows, stop=3, **options | first)
        options["resume_from_checkpoint"] = True
    found = on_ranks(ranks, tmp_path, 8 // ranks, bad_rows, kind=kind, **options)
    for losses, bad in found:
        assert expected == pytest.approx(losses, rel=2e-5)
        assert count == bad


@pytest.mark.parametrize("workers", [0, 2])
def test_the_limit_does_not_count_rows_that_are_read_ahead(tmp_path, workers):
    settings = {"max_steps": 5, "dataloader_num_workers": workers}
    _, count = run(tmp_path / "one", "single", 8, bad_rows, bad_rows="skip", **settings)
    losses, found = run(tmp_path / "two", "single", 8, bad_rows, bad_rows=count, **settings)
    assert count == found
    assert len(losses) == 5
    error, _ = run(tmp_path / "three", "single", 8, bad_rows, bad_rows=count - 1, **settings)
    assert "FG958" in error


class Endless(TorchRows):
    def __iter__(self):
        ids = torch.arange(8)
        while True:
            yield {"input_ids": ids, "labels": ids}


def lines_of_a_run(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("forgather").addHandler(handler)
    run(folder, "DDP", 2, Endless, max_steps=1, data_streams=None)
    return [line for line in lines if "reads all training rows" in line]


def test_a_line_names_rows_that_each_replica_reads_whole(tmp_path):
    assert run_ranks(1, lines_of_a_run, tmp_path / "one", timeout=30) == [[]]
    (line,), others = run_ranks(2, lines_of_a_run, tmp_path / "two", timeout=30)
    assert "each of 2 replicas reads all training rows, and uses one of 2: Endless has no shards" in line
    assert others == []


class Shifted(Faulty):
    """Shards, of which the second one may have been written again with other rows."""

    def __init__(self, shift):
        super().__init__({}, [40, 40])
        self.shift = shift

    def open(self, shard, offset=None):
        return ShiftedReader(self, shard, offset or 0)


class ShiftedReader(FaultyReader):
    def __next__(self):
        row = super().__next__()
        return {**row, "input_ids": (row["input_ids"] + self.owner.shift * self.shard) % 96}


def shifted(shift):
    return RowStream.of_shards(Shifted(shift), buffer_size=16, seed=3)


@pytest.mark.parametrize(
    "options", thinned([{}, {"dataloader_num_workers": 1}, {"data_streams": 1}], lambda options: not options)
)
def test_a_change_that_one_rank_sees_is_raised_by_all(tmp_path, options):
    options = {"data_streams": 2, "max_steps": 8, **options}
    on_ranks(2, tmp_path, 2, functools.partial(shifted, 0), stop=3, **options)
    changed = on_ranks(2, tmp_path, 2, functools.partial(shifted, 1), resume_from_checkpoint=True, **options)
    for error, _ in changed:
        assert re.search("FG610.*stream 0 gives other rows at the same place: counted 1 has other rows", error), error
