"""Data sets whose rows tell which they are and what was drawn for them, and readers that stop and go on.

Takes a kind of data (map, iterable, packed); gives micro-batches as lists of (row, draws). Keeps true: every row draws
from torch, Python and NumPy, and so does the collator; a stream is shuffled in a buffer, from global random numbers;
the position goes from reader to reader as JSON text.
"""

import functools
import json
import random

import numpy as np
import torch
from torch.utils.data import get_worker_info

from forgather.ml import TrainingArguments
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.data.packing import pack
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.types import PaddingBatch, Topology
from tests.ml.fixtures import VOCAB, tiny_llama

KINDS = ("map", "iterable", "packed")
LENGTH = 8


@functools.cache
def _rule():
    with torch.random.fork_rng():
        return loss_rule(tiny_llama())


def drawn():
    """Three numbers, one of each source."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def row(number):
    """A row of a language model: whole numbers that follow from its own number, and draws."""
    ids = torch.tensor([(number * 7 + place) % VOCAB for place in range(LENGTH)])
    return {"input_ids": ids, "labels": ids.clone(), "number": torch.tensor(number), "draws": torch.tensor(drawn())}


class Numbered(torch.utils.data.Dataset):
    """Rows that have positions."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return row(index)


class Packed(torch.utils.data.Dataset):
    """Documents of uneven length in blocks of one; a row is a block, whose first token differs from row to row."""

    def __init__(self, count):
        lengths = [3 + number % 5 for number in range(2 * count)]
        blocks = [
            packed.ids_BT for packed in pack([[[number] * length for number, length in enumerate(lengths)]], LENGTH, 0)
        ]
        self.blocks = torch.from_numpy(np.concatenate(blocks)[:count]).long() % VOCAB
        assert count == len(self.blocks)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        found = row(index)
        return {**found, "input_ids": self.blocks[index], "labels": self.blocks[index].clone()}


class Shuffled(torch.utils.data.IterableDataset):
    """A stream, shuffled in a buffer; workers share its rows."""

    def __init__(self, count, buffer=5):
        self.count = count
        self.buffer = buffer
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        waiting = []
        for number in range(first, self.count, step):
            waiting.append(number)
            if len(waiting) >= self.buffer:
                yield row(waiting.pop(random.randrange(len(waiting))))
        random.shuffle(waiting)
        yield from map(row, waiting)


def data_of(kind, count):
    """Returns a data set of `count` rows."""
    return {"map": Numbered, "iterable": Shuffled, "packed": Packed}[kind](count)


def collate(rows):
    """Stacks rows; draws once for each, so that what a collator draws depends on how many rows it is given."""
    batch = {name: torch.stack([one[name] for one in rows]) for name in rows[0]}
    batch["draws"] = torch.cat([batch["draws"], torch.tensor([drawn() for _ in rows])], dim=1)
    return batch


def drawn_collate(rows):
    """A micro-batch whose first tokens are what rows and collator drew."""
    batch = collate(rows)
    ids = batch["input_ids"].clone()
    ids[:, :6] = (batch["draws"] * VOCAB).long()
    return {"input_ids": ids, "labels": ids.clone()}


class Reader:
    """The training data of one replica.

    Args:
        data: rows.
        replica: which one, of `of`.
        settings: of the arguments.
    """

    def __init__(self, data, *, replica=0, of=1, batch_size=2, **settings):
        args = {"per_device_train_batch_size": batch_size, "max_steps": 10**6, "use_cpu": True, "seed": 3, **settings}
        topology = Topology(
            rank=replica, world_size=of, device=torch.device("cpu"), is_writer=not replica, dp_rank=replica, dp_size=of
        )
        self.batches = TrainBatches(data, TrainingArguments("unused", **args), collate, topology=topology)

    def updates(self, epochs):
        """Yields, for each update up to the end of an epoch, (epoch, its micro-batches)."""
        while self.batches.epoch < epochs:
            if not self.batches.at_end_of_epoch:
                for window in self.batches.windows(_rule()):
                    self.batches.advance(window)
                    yield self.batches.epoch, [told(batch) for batch in window.batches]
            self.batches.next_epoch()

    def position(self):
        """Returns the position and the random states as a checkpoint holds them; the position is JSON."""
        return json.dumps(self.batches.state_dict()), capture_rng()

    def go_to(self, position):
        """Goes on from a position; random states take hold when rows are read."""
        text, random_states = position
        self.batches.load_state_dict(json.loads(text))
        restore_rng(random_states)
        return self


def told(batch):
    """Returns [(number, draws), ...] of a micro-batch; nothing for one that counts for nothing."""
    if isinstance(batch, PaddingBatch):
        return []
    columns = (batch[name].tolist() for name in ("number", "draws"))
    return [(number, tuple(draws)) for number, draws in zip(*columns, strict=True)]


def numbers(updates):
    """Returns the numbers of the rows of updates, by epoch."""
    found = {}
    for epoch, batches in updates:
        found.setdefault(epoch, []).extend(number for batch in batches for number, _ in batch)
    return found
