"""Which rows make which update.

Takes a data set, the arguments and which share of the rows is this process's own; gives windows of micro-batches. Keeps
true: the order of an epoch is a function of seed and epoch alone, so the position of a run is two numbers, and going on
from them costs nothing; the global random state is not touched; each row is met once an epoch, by one replica, also
where other replicas go on than began it. The micro-batches of all replicas together are those of one process with as
many rows, in the same order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from forgather.errors import CheckpointError, TrainingError
from forgather.interrupt import leave_to_parent
from forgather.ml.log import get_logger
from forgather.ml.losses import LossRule
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.batch_sampler import EpochBatches, OwnRows, Ready, Share, cannot_fill_up, epoch_seed
from forgather.ml.trainer.collation import has_new_boundaries
from forgather.ml.trainer.data_fingerprint import Fingerprint, FirstRows, fingerprint, refuse_other_data
from forgather.ml.trainer.data_rng import Rows, Stream, as_it_is
from forgather.ml.trainer.rewind import RowRange
from forgather.ml.types import PaddingBatch, Topology, Window

_log = get_logger(__name__)

Collate = Callable[[list[Any]], Any]


class OwnBatches:
    """This process's micro-batches of a data set.

    Args:
        dataset: map-style (a length and rows by number) or iterable; the whole of it on every process.
        share: the part of a micro-batch that is this process's own.
        collate: rows to a micro-batch.
        options: of the loader, see `loader_options`.
        order: seed of the shuffling; None keeps the order of the data.
        drop_last: leave out a last micro-batch that is not full.
        draws_apart: False lets rows that are read in this process draw from the run's own random numbers, which a
            checkpoint holds. Workers always draw apart, and so does a stream, which is read again after a resume.

    Raises:
        TrainingError: FG853 for a data set that is split among processes already.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        collate: Collate,
        options: dict[str, Any],
        *,
        order: int | None = None,
        drop_last: bool = False,
        draws_apart: bool = True,
    ) -> None:
        self.dataset = dataset
        self.share = share
        self.workers: int = options["num_workers"]
        self._generator = torch.Generator().manual_seed(0)
        self._sampler: EpochBatches | None = None
        self._stream: Stream | None = None
        self._first_rows = FirstRows(in_workers=self.workers > 0)
        self._options = dict(options)
        self._known: frozenset[str] | None = getattr(collate, "known", None)
        if is_iterable(dataset):
            _refuse_split(dataset)
            # Every process reads all rows: those of a worker are its own too, then, whatever the number of processes.
            own = collate if share.size == 1 else OwnRows(collate, share)
            stream = Stream(
                dataset,
                own,
                batch_rows=share.all_rows,
                replica=share.rank,
                in_workers=self.workers > 0,
                note=self._first_rows.noted,
            )
            options |= {"batch_size": share.all_rows, "drop_last": drop_last, "collate_fn": stream.collated}
            self.loader: DataLoader[Any] = DataLoader(stream, generator=self._generator, **options)
            self._stream = stream
        else:
            apart = draws_apart or self.workers > 0
            self._sampler = EpochBatches(len(dataset), share, order=order, drop_last=drop_last, carry_seeds=apart)
            options |= {"batch_sampler": self._sampler, "collate_fn": as_it_is if apart else collate}
            read = Rows(dataset, collate) if apart else dataset
            self.loader = DataLoader(read, generator=self._generator, **options)

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None where nobody knows."""
        return None if self._sampler is None else self._sampler.num_rows

    @functools.cached_property
    def _fingerprint(self) -> Fingerprint:
        return fingerprint(self.dataset, self._options, self._known)

    @property
    def fingerprint(self) -> Fingerprint:
        """What is known of the rows; of a stream, of the first ones of the epoch that were read."""
        return self._first_rows.fingerprint if self._sampler is None else self._fingerprint

    @property
    def is_shuffled(self) -> bool:
        """Tells whether the rows are met in another order than that of the data set."""
        return self._sampler is not None and self._sampler.order is not None

    def left(self, start: int) -> int | None:
        """Returns the number of micro-batches after the first `start` rows; None where nobody knows."""
        return None if self._sampler is None else self._sampler.left(start)

    def read(
        self, rule: LossRule, *, start: int = 0, epoch: int = 0, seed: int = 0, last: str | None = None
    ) -> Iterator[Ready]:
        """Returns the micro-batches of an epoch, as a strategy gets them.

        Args:
            rule: counts targets.
            start: rows of all processes that are read past, at once.
            epoch: whose rows they are.
            seed: of what rows draw.
            last: digest that the last micro-batch of a stream had that is read past; None where that is not known.

        Raises:
            TrainingError: FG852 where micro-batches must be of one size, the last one is not, and this loss counts
                every row.
        """
        self._refuse_short(rule, start)
        self._generator.manual_seed(epoch_seed(seed, epoch) + self.share.rank)
        if self._sampler is not None:
            self._sampler.place(seed=seed, epoch=epoch, start=start)
            return self._ready(iter(self.loader), rule, start)
        assert self._stream is not None, "rows have positions, or are a stream"  # noqa: S101
        if start:
            _log.info("reading past %d rows of a data set without positions", start)
        past = start if last is None else max(0, start - self.share.all_rows)
        self._stream.place(seed=seed, epoch=epoch, skip=0 if self.workers else past)
        batches: Iterator[Any] = iter(self.loader)
        if self.workers:
            # Which worker is next follows from how many micro-batches were given, so all of them are.
            given = past // self.share.all_rows
            next(itertools.islice(batches, given, given), None)
        else:
            batches = self._stream.drawn_apart(batches)
        ready = self._ready(batches, rule, past)
        return after_the_same(ready, last) if last is not None and start else ready

    def _ready(self, batches: Iterator[Any], rule: LossRule, start: int) -> Iterator[Ready]:
        for number, batch in enumerate(batches):
            first = start + number * self.share.all_rows
            is_empty = self._sampler is not None and self._sampler.is_empty(first)
            yield self.share.ready(PaddingBatch(batch) if is_empty else batch, rule)

    def _refuse_short(self, rule: LossRule, start: int) -> None:
        # Found on every process at once, before one of them meets the short micro-batch.
        if self._sampler is None or not self.share.fixed or rule.ignore_index is not None or self._sampler.drop_last:
            return
        if rest := (self._sampler.num_rows - start) % self.share.all_rows:
            raise cannot_fill_up(rest, self.share.all_rows)


class TrainBatches:
    """The training data as windows, and the position in it.

    Args:
        dataset: map-style (a length and rows by number) or iterable.
        args: batch size, accumulation, seeds, loader options.
        collate: rows to a micro-batch.
        topology: who this process is; it tells which rows are its own.

    Raises:
        TrainingError: FG803 for no rows, FG804 for a batch larger than the data, FG805 for a data set
            without a length where `max_steps` is not set, FG853 for one that is split already.
    """

    def __init__(self, dataset: Any, args: TrainingArguments, collate: Collate, *, topology: Topology) -> None:
        self.accumulation = args.gradient_accumulation_steps
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.epoch = 0
        self.row = 0
        self._latest: Any = None
        self._last: str | None = None
        self._expected: Fingerprint | None = None
        self._may_change = "data" in (args.allow_changed or ())
        share = Share.by(topology, args.per_device_train_batch_size)
        if not is_iterable(dataset):
            check_size(len(dataset), share)
        elif args.max_steps <= 0:
            raise TrainingError(
                "the training data has no length, and max_steps is not set",
                code="FG805",
                hint="set max_steps, or give a data set with a length",
            )
        self._own = OwnBatches(
            dataset,
            share,
            collate,
            loader_options(args, topology),
            order=self.seed if args.train_sampling_strategy == "random" else None,
            drop_last=args.dataloader_drop_last,
            draws_apart=False,  # it would cost each step 0.06 ms
        )
        self.loader = self._own.loader

    @property
    def num_batches(self) -> int | None:
        """Micro-batches of an epoch; None where nobody knows."""
        return self._own.left(0)

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None where nobody knows."""
        return self._own.num_rows

    @property
    def batch(self) -> int:
        """Micro-batches of the present epoch that were trained on; a begun one counts, where others than now were."""
        return math.ceil(self.row / self._own.share.all_rows)

    @property
    def updates_per_epoch(self) -> int | None:
        """Updates of an epoch; None where nobody knows."""
        return None if self.num_batches is None else math.ceil(self.num_batches / self.accumulation)

    @property
    def at_end_of_epoch(self) -> bool:
        """True where no micro-batch of the epoch is left, as far as is known."""
        return self._own.left(self.row) == 0

    def windows(self, rule: LossRule) -> Iterator[Window]:
        """Returns the windows of the present epoch, from the present position on.

        Rows before the position are read past at once, and nothing here draws from the run's random numbers.
        """
        last, self._last = self._last, None
        batches = self._own.read(rule, start=self.row, epoch=self.epoch, seed=self.seed, last=last)
        expected, self._expected = self._expected, None
        windows = self._windows(batches, rule)
        return windows if expected is None else after_first(windows, functools.partial(self._compare, expected))

    def _compare(self, expected: Fingerprint) -> None:
        say_changed(expected.differences(self.fingerprint), may_change=self._may_change)

    def _windows(self, batches: Iterator[Ready], rule: LossRule) -> Iterator[Window]:
        while ready := list(itertools.islice(batches, self.accumulation)):
            yield Window(
                batches=[item.batch for item in ready],
                num_valid=_total([rule.count(item.batch) for item in ready]),
                num_tokens=sum(item.num_tokens for item in ready),
                num_rows=sum(item.num_rows for item in ready),
            )

    def same_everywhere(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Gives the windows of a stream on, whose first rows all processes must have alike.

        Raises:
            DistributedError: FG855, on every process.
        """
        own = functools.partial(refuse_other_data, "the beginning of the training data")
        return after_first(windows, lambda: own(self.fingerprint))

    def rows_of(self, window: Window) -> RowRange:
        """Returns the rows, of all processes, of the window at the present position."""
        return RowRange(self.epoch, self.row, self.row + len(window.batches) * self._own.share.all_rows)

    def advance(self, window: Window) -> None:
        """Moves the position past a window that was trained on."""
        self.row += len(window.batches) * self._own.share.all_rows
        if self.num_rows is None:
            self._latest = window.batches[-1]
        else:
            self.row = min(self.row, self.num_rows)

    def next_epoch(self) -> None:
        """Moves the position to the start of the next epoch."""
        self.epoch += 1
        self.row = 0

    @property
    def fingerprint(self) -> Fingerprint:
        """What is known of the rows, see `OwnBatches.fingerprint`."""
        return self._own.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and what is known of the data; of a stream also what its last micro-batch was here."""
        position = {"epoch": self.epoch, "row": self.row, "batch": self.batch, **self._facts()}
        if self.num_rows is not None or self.row:
            position["fingerprint"] = self.fingerprint.to_state()
        if self._latest is None or not self.row:
            return position
        return position | {"last": {"digest": digest_of(self._latest), **self._own.share.facts}}

    def _facts(self) -> dict[str, Any]:
        own = self._own
        facts = {"num_rows": own.num_rows, "seed": self.seed, "batch_rows": own.share.all_rows}
        facts["update_rows"] = own.share.all_rows * self.accumulation
        return facts | ({"workers": own.workers} if own.num_rows is None else {"shuffled": own.is_shuffled})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position, after the rows that were trained on.

        Raises:
            CheckpointError: FG610 where the data are not those of the checkpoint, and may not be others; of a stream
                it is raised when its rows are read.
        """
        now = self._facts()
        before = {**now, **state}
        self.epoch, self.row = state["epoch"], state.get("row", state["batch"] * before["batch_rows"])
        self.row = min(self.row, self.num_rows or self.row)
        last = dict(state.get("last", {}))
        digest = last.pop("digest", None)
        self._last = digest if last == self._own.share.facts else None
        known = Fingerprint.of(state["fingerprint"]) if "fingerprint" in state else None
        changed = other_order(before, now)
        if self.num_rows is None:
            self._expected = known if known is not None and known.num_rows is None else None
        elif known is None:
            changed += since_an_earlier_release(has_new_boundaries(self._own.dataset))
        elif before["num_rows"] == now["num_rows"]:
            changed += known.differences(self.fingerprint)
        say_changed(changed, may_change=self._may_change)
        if not changed and before["update_rows"] != now["update_rows"]:
            _log.warning(
                "an update takes %d rows, and took %d before the checkpoint: rows are met in the same order, and where "
                "the product of replicas, per_device_train_batch_size and gradient_accumulation_steps stays, so are "
                "the same updates",
                now["update_rows"],
                before["update_rows"],
            )


def _total(counts: list[Any]) -> Any:
    return counts[0] if len(counts) == 1 else sum(counts)


def is_iterable(dataset: Any) -> bool:
    """Tells whether a data set gives rows only in its own order."""
    if isinstance(dataset, IterableDataset) or type(dataset).__name__ == "IterableDataset":
        return True
    return not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"))


def _refuse_split(dataset: Any) -> None:
    split = getattr(dataset, "_distributed", None)
    if split is not None:
        raise TrainingError(
            f"the data set is split already: this is part {split.rank} of {split.world_size}",
            code="FG853",
            hint="give every process the whole of it (without split_dataset_by_node): each takes its own rows",
        )


def check_size(rows: int, share: Share) -> None:
    """Raises where a data set has no rows, or fewer than one batch."""
    if rows == 0:
        raise TrainingError("the training data has no rows", code="FG803", hint="look at what filters and splits it")
    if rows < share.all_rows:
        replicas = f" on each of {share.size} replicas" if share.size > 1 else ""
        possible = rows // share.size
        raise TrainingError(
            f"per_device_train_batch_size is {share.rows}{replicas}, and the training data has {rows} rows",
            code="FG804",
            hint=f"set per_device_train_batch_size to {possible} or less" if possible else "start fewer processes",
        )


def loader_options(args: TrainingArguments, topology: Topology) -> dict[str, Any]:
    """Returns what training and evaluation loaders have in common."""
    options: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and topology.device.type == "cuda",
    }
    if args.dataloader_num_workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["worker_init_fn"] = _leave_interrupts_to_the_parent
    return options


def _leave_interrupts_to_the_parent(worker: int) -> None:
    leave_to_parent()


T = TypeVar("T")


def other_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns, in words, what has the rows of an epoch come in another order, or makes them more or fewer."""
    facts = ["num_rows", "seed", "shuffled"]
    if "workers" in now and (before["workers"] or now["workers"]):
        facts += ["workers", "batch_rows"]  # workers share a stream among them by micro-batches
    return [f"{name} {before.get(name)}, now {now.get(name)}" for name in facts if before.get(name) != now.get(name)]


def since_an_earlier_release(has_boundaries: bool) -> list[str]:
    """Returns, in words, what differs from a checkpoint that does not tell its rows, and says that it does not.

    Args:
        has_boundaries: the rows are now those of `tokenize` with document boundaries.
    """
    _log.warning(
        "the checkpoint is of an earlier release, and does not tell which rows its training data had: their number and "
        "order alone were compared"
    )
    if not has_boundaries:
        return []
    return [
        "the rows have document boundaries now, and 'tokenize' of an earlier release made none: with "
        "document_boundaries: false it makes the rows of that time"
    ]


def say_changed(changed: list[str], *, may_change: bool) -> None:
    """Tells what has changed of the training data, if anything has.

    Raises:
        CheckpointError: FG610 where nothing may change.
    """
    what = f"the training data changed since the checkpoint: {'; '.join(changed)}"
    if changed and not may_change:
        raise CheckpointError(
            what,
            code="FG610",
            hint="go on with the same data, made in the same way; or, where other rows are meant, with "
            "--allow-changed data (allow_changed: [data]): rows may be met twice or not at all in this epoch then",
        )
    if changed:
        _log.warning("%s: rows may be met twice or not at all in this epoch", what)


def after_first(items: Iterator[T], act: Callable[[], None]) -> Iterator[T]:
    """Yields items; `act` is called once the first of them is there."""
    for number, item in enumerate(items):
        if number == 0:
            act()
        yield item


def digest_of(batch: Any) -> str | None:
    """Returns a digest of the tensors of a micro-batch; None where there are none."""
    parts = [batch[name] for name in sorted(batch)] if isinstance(batch, Mapping) else batch
    parts = parts if isinstance(parts, list | tuple) else [parts]
    tensors = [part.detach().cpu() for part in parts if isinstance(part, Tensor)]
    if not tensors:
        return None
    hashed = xxhash.xxh3_64()
    for tensor in tensors:
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def after_the_same(items: Iterator[Ready], expected: str) -> Iterator[Ready]:
    """Returns the micro-batches after the first, and says so where that one is not what it was."""
    first = next(items, None)
    if first is None or digest_of(first.batch) != expected:
        _log.warning(
            "the training data gives other rows than before the checkpoint: rows may be met twice or not at all in "
            "this epoch; a data set without a length must give the same rows again (give its shuffling a seed)"
        )
    return items
