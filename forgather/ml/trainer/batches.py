"""Which rows make which update.

Takes a data set and the arguments; gives windows of micro-batches. Keeps true: the order of an epoch is
a function of seed and epoch alone, so the position of a run is two numbers, and going on from them costs
nothing; the global random state is not touched; each row is met once an epoch.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.ml.losses import LossRule, num_rows, num_tokens
from forgather.ml.trainer.args import TrainingArguments
from forgather.ml.types import Window

_log = get_logger(__name__)

Collate = Callable[[list[Any]], Any]


class EpochBatches(Sampler[list[int]]):
    """The rows of each micro-batch of one epoch, from any position.

    Args:
        num_rows: rows of the data set.
        batch_size: rows of one micro-batch.
        seed: of the shuffling; None keeps the order of the data.
        drop_last: leave out a last micro-batch that is not full.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int | None, drop_last: bool) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole if self.drop_last else whole + bool(rest)

    def __iter__(self) -> Iterator[list[int]]:
        order = range(self.num_rows) if self.seed is None else self._shuffled(self.seed)
        for batch in range(self.start, len(self)):
            yield list(order[batch * self.batch_size : (batch + 1) * self.batch_size])

    def _shuffled(self, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(epoch_seed(seed, self.epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch; different epochs and different seeds do not meet."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 1) % (2**63)


class TrainBatches:
    """The training data as windows, and the position in it.

    Args:
        dataset: map-style (a length and rows by number) or iterable.
        args: batch size, accumulation, seeds, loader options.
        collate: rows to a micro-batch.
        pin_memory: copy micro-batches to pinned memory.

    Raises:
        TrainingError: FG803 for no rows, FG804 for a batch larger than the data, FG805 for a data set
            without a length where `max_steps` is not set.
    """

    def __init__(self, dataset: Any, args: TrainingArguments, collate: Collate, *, pin_memory: bool) -> None:
        self.dataset = dataset
        self.accumulation = args.gradient_accumulation_steps
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.epoch = 0
        self.batch = 0
        self._generator = torch.Generator()
        self._sampler: EpochBatches | None = None
        options = loader_options(args, collate, pin_memory=pin_memory)
        if is_iterable(dataset):
            if args.max_steps <= 0:
                raise TrainingError(
                    "the training data has no length, and max_steps is not set",
                    code="FG805",
                    hint="set max_steps, or give a data set with a length",
                )
            options |= {"batch_size": args.per_device_train_batch_size, "drop_last": args.dataloader_drop_last}
        else:
            check_size(len(dataset), args.per_device_train_batch_size)
            shuffle = args.train_sampling_strategy == "random"
            self._sampler = EpochBatches(
                len(dataset),
                args.per_device_train_batch_size,
                seed=self.seed if shuffle else None,
                drop_last=args.dataloader_drop_last,
            )
            options["batch_sampler"] = self._sampler
        self.loader: DataLoader[Any] = DataLoader(dataset, generator=self._generator, **options)

    @property
    def num_batches(self) -> int | None:
        """Micro-batches of an epoch; None where nobody knows."""
        return None if self._sampler is None else len(self._sampler)

    @property
    def updates_per_epoch(self) -> int | None:
        """Updates of an epoch; None where nobody knows."""
        return None if self.num_batches is None else math.ceil(self.num_batches / self.accumulation)

    @property
    def at_end_of_epoch(self) -> bool:
        """True where no micro-batch of the epoch is left, as far as is known."""
        return self.num_batches is not None and self.batch >= self.num_batches

    def windows(self, rule: LossRule) -> Iterator[Window]:
        """Returns the windows of the present epoch, from the present position on.

        Rows before the position are read past at once, so that randomness restored afterwards is not used up.
        """
        return self._windows(self._rest_of_epoch(), rule)

    def _windows(self, batches: Iterator[Any], rule: LossRule) -> Iterator[Window]:
        while micro_batches := list(itertools.islice(batches, self.accumulation)):
            yield Window(
                batches=micro_batches,
                num_valid=_total([rule.count(batch) for batch in micro_batches]),
                num_tokens=sum(num_tokens(batch) for batch in micro_batches),
                num_rows=sum(num_rows(batch) for batch in micro_batches),
            )

    def advance(self, window: Window) -> None:
        """Moves the position past a window that was trained on."""
        self.batch += len(window.batches)

    def next_epoch(self) -> None:
        """Moves the position to the start of the next epoch."""
        self.epoch += 1
        self.batch = 0

    def _rest_of_epoch(self) -> Iterator[Any]:
        self._generator.manual_seed(epoch_seed(self.seed, self.epoch))
        if self._sampler is not None:
            self._sampler.epoch, self._sampler.start = self.epoch, self.batch
            return iter(self.loader)
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        if self.batch:
            _log.info("reading past %d micro-batches of a data set without positions", self.batch)
        batches = iter(self.loader)
        next(itertools.islice(batches, self.batch, self.batch), None)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain numbers."""
        return {"epoch": self.epoch, "batch": self.batch, "seed": self.seed, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position; says so where the data changed since."""
        if state["num_batches"] != self.num_batches or state["seed"] != self.seed:
            _log.warning(
                "the training data changed since the checkpoint (%s micro-batches an epoch and seed %s, "
                "now %s and %s): rows may be met twice or not at all in this epoch",
                state["num_batches"],
                state["seed"],
                self.num_batches,
                self.seed,
            )
        self.epoch, self.batch = state["epoch"], state["batch"]


def _total(counts: list[Any]) -> Any:
    return counts[0] if len(counts) == 1 else sum(counts)


def is_iterable(dataset: Any) -> bool:
    """Tells whether a data set gives rows only in its own order."""
    if isinstance(dataset, IterableDataset) or type(dataset).__name__ == "IterableDataset":
        return True
    return not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"))


def check_size(rows: int, batch_size: int) -> None:
    """Raises where a data set has no rows, or fewer than one batch."""
    if rows == 0:
        raise TrainingError("the training data has no rows", code="FG803", hint="look at what filters and splits it")
    if rows < batch_size:
        raise TrainingError(
            f"per_device_train_batch_size is {batch_size}, and the training data has {rows} rows",
            code="FG804",
            hint=f"set per_device_train_batch_size to {rows} or less",
        )


def loader_options(args: TrainingArguments, collate: Collate, *, pin_memory: bool) -> dict[str, Any]:
    """Returns what training and evaluation loaders have in common."""
    options: dict[str, Any] = {
        "collate_fn": collate,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and pin_memory,
    }
    if args.dataloader_num_workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["worker_init_fn"] = _leave_interrupts_to_the_parent
    return options


def _leave_interrupts_to_the_parent(worker: int) -> None:
    # Ctrl-C reaches every process of a terminal; a worker that died of it would fail the step that the trainer
    # wants to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
