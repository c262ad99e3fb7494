"""Reads training and evaluation data as rank-local micro-batches, with a position that a checkpoint stores.

Training data is returned as windows: a window is the micro-batches of one optimizer step. The order of the rows of an
epoch depends on the seed and the epoch number alone. The position therefore consists of two numbers, and a resumed run
skips the rows of a map-style data set without reading them. Shuffling does not change the global random state. Every
row is trained on once per epoch, by one data-parallel rank, even if the run is resumed with another number of ranks.
The global micro-batches are the same, in the same order, as those of a single process with the same number of rows per
micro-batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from forgather.errors import TrainingError
from forgather.ml.data.row_epoch import EpochDataset, next_in_epoch
from forgather.ml.data.row_stream import stream_of
from forgather.ml.distributed import collectives
from forgather.ml.label_kind import LabelCheck
from forgather.ml.log import get_logger
from forgather.ml.losses import LossRule
from forgather.ml.number_format import plural
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.bad_rows import STOP, BadRows
from forgather.ml.trainer.batch_sampler import (
    PreparedBatch,
    RankBatchSampler,
    RankCollator,
    RankShare,
    cannot_pad,
    cannot_pad_streams,
    epoch_seed,
)
from forgather.ml.trainer.collation import has_new_boundaries
from forgather.ml.trainer.data_changes import (
    after_first,
    after_matching_batch,
    batch_digest,
    changes_since_earlier_release,
    order_changes,
    report_data_changes,
)
from forgather.ml.trainer.data_fingerprint import Fingerprint, FirstRows, fingerprint, refuse_other_data
from forgather.ml.trainer.data_rng import SeededDataset, SeededStream, already_collated
from forgather.ml.trainer.length_groups import LengthGroups, no_lengths, row_lengths
from forgather.ml.trainer.loader_options import loader_options, reading_draws_nothing, usual_workers
from forgather.ml.trainer.read_retries import RetriedDataset, Retries, retried_rows
from forgather.ml.trainer.rewind import RowRange
from forgather.ml.trainer.row_checks import check_size, refuse_split
from forgather.ml.trainer.row_order import AUTO, COMPUTED_RULE, LISTED, order_rule
from forgather.ml.trainer.stream_batches import RankRows, StreamBatches
from forgather.ml.trainer.stream_choice import chosen_streams, is_iterable, warn_of_whole_reads
from forgather.ml.types import PaddingBatch, Topology, Window

_log = get_logger(__name__)

Collate = Callable[[list[Any]], Any]


class RankBatches:
    """The rank-local micro-batches of a data set.

    Args:
        dataset: the whole data set on every process, either map-style (with a length, and rows by number) or iterable.
        share: the slice of each global micro-batch that this process computes.
        collate: the collator, a function from a list of rows to a micro-batch.
        options: the options of the `DataLoader`, see `loader_options`.
        order: the seed of the shuffling; None keeps the order of the data set.
        shuffle_order: the training argument of that name, see `row_order.order_rule`.
        group_rows: the number of rows of similar length that follow one another in the shuffled order, at least; 0 for
            rows in a random order.
        drop_last: whether to omit an incomplete last micro-batch.
        draws_apart: whether the data set and the collator draw random numbers from separate seeds. If false, they draw
            from the run's global random state, which checkpoints store. Separate seeds are always used in worker
            processes, for an `EpochDataset` and data sets with a method `set_epoch`, and for iterable data sets, whose
            rows a resumed run reads again.
        argument: the argument of the trainer that the data set is, for error messages.
        num_streams: the number of virtual streams by which the rows are read, see `chosen_streams`; 0 if every process
            reads all rows of an iterable data set.

    Raises:
        TrainingError: FG853 if the data set is already split among processes, FG946 if rows are to be grouped and have
            no length.
    """

    def __init__(
        self,
        dataset: Any,
        share: RankShare,
        collate: Collate,
        options: dict[str, Any],
        *,
        order: int | None = None,
        shuffle_order: str = LISTED,
        group_rows: int = 0,
        drop_last: bool = False,
        draws_apart: bool = True,
        argument: str = "eval_dataset",
        num_streams: int = 0,
    ) -> None:
        self.argument = argument
        self.dataset = dataset
        self._given = (share, collate, dict(options), drop_last)
        self._drops_last = drop_last
        options = dict(options)
        self.share = share
        self.workers: int = options["num_workers"]
        self._generator = torch.Generator().manual_seed(0)
        self._sampler: RankBatchSampler | None = None
        self._stream: SeededStream | None = None
        self.may_be_read_early = True
        """Whether reading a batch draws no number of the run's global random state."""
        self._first_rows = FirstRows(in_workers=self.workers > 0)
        self.retries = Retries(options.pop("retries", 0))
        self.bad_rows = BadRows(options.pop("bad_rows", STOP), self.retries)
        dispatch = options.pop("dispatch_rows", False), options.pop("host", 0)
        self._options = dict(options)
        self._known: frozenset[str] | None = getattr(collate, "known", None)
        self.streams: StreamBatches | None = None
        refuse_split(dataset)
        if num_streams:
            if group_rows:
                raise no_lengths("a data set without a length is read in its own order")
            found = stream_of(dataset)
            assert found is not None, "the number of streams was chosen for this data set"  # noqa: S101
            self.streams = StreamBatches(
                found,
                share,
                collate,
                options,
                num_streams=num_streams,
                guard=self.bad_rows,
                generator=self._generator,
                inner=dataset,
                dispatch=dispatch,
            )
            self.streams.log_reads()
            self.loader: DataLoader[Any] = self.streams.loader
        elif is_iterable(dataset):
            if group_rows:
                raise no_lengths("a data set without a length is read in its own order")
            if share.size > 1 and argument == "train_dataset":
                warn_of_whole_reads(dataset, share.size)
            # Every process reads all rows of a stream and keeps its own, so the rows that a worker reads do not depend
            # on the number of processes.
            own = collate if share.size == 1 else RankCollator(collate, share)
            stream = SeededStream(
                dataset,
                own,
                batch_rows=share.all_rows,
                replica=share.rank,
                in_workers=self.workers > 0,
                note=self._first_rows.noted,
                read=functools.partial(retried_rows, retries=self.retries) if self.retries.limit else iter,
            )
            options |= {"batch_size": share.all_rows, "drop_last": drop_last, "collate_fn": stream.collated}
            self.loader = DataLoader(stream, generator=self._generator, **options)
            self._stream = stream
        else:
            by_epoch = isinstance(dataset, EpochDataset) or hasattr(dataset, "set_epoch")
            apart = draws_apart or self.workers > 0 or by_epoch
            self.may_be_read_early = apart or reading_draws_nothing(dataset, collate)
            groups = LengthGroups(row_lengths(dataset), group_rows) if group_rows else None
            self._sampler = RankBatchSampler(
                len(dataset), share, order=order, groups=groups, drop_last=drop_last, carry_seeds=apart
            )
            self._sampler.order_rule = order_rule(shuffle_order, len(dataset))
            options |= {"batch_sampler": self._sampler, "collate_fn": already_collated if apart else collate}
            read = SeededDataset(dataset, collate) if apart else dataset
            read = RetriedDataset(read, self.retries) if self.retries.limit else read
            self.loader = DataLoader(read, generator=self._generator, **options)

    def by_streams(self, num_streams: int) -> RankBatches:
        """Returns the batches of the same data set, read by another number of virtual streams."""
        share, collate, options, drop_last = self._given
        return RankBatches(
            self.dataset, share, collate, options, drop_last=drop_last, argument=self.argument, num_streams=num_streams
        )

    @property
    def num_rows(self) -> int | None:
        """The number of rows of an epoch; None if it is unknown."""
        return None if self._sampler is None else self._sampler.num_rows

    @functools.cached_property
    def _fingerprint(self) -> Fingerprint:
        return fingerprint(self.dataset, self._options, self._known)

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the data set, or of the first rows of the epoch if the data set is iterable."""
        if self.streams is not None:
            return self.streams.rows.fingerprint
        return self._first_rows.fingerprint if self._sampler is None else self._fingerprint

    @property
    def is_shuffled(self) -> bool:
        """True if the rows of an epoch are shuffled."""
        return self._sampler is not None and self._sampler.order is not None

    @property
    def transformers_seed(self) -> int | None:
        """The seed of the order of rows that transformers made, if the run goes on with it; otherwise None."""
        return None if self._sampler is None else self._sampler.transformers_seed

    def take_order_of_transformers(self, seed: int | None) -> None:
        """Reads the rows in the order of transformers, in a run that was begun there; None returns to our own order.

        Args:
            seed: the seed with which transformers shuffled.
        """
        if self._sampler is not None:
            self._sampler.transformers_seed = seed

    @property
    def order_rule(self) -> str:
        """The rule by which the rows of an epoch are shuffled, as a checkpoint records it."""
        return self._sampler.order_rule if self._sampler is not None and self._sampler.is_computed else LISTED

    def take_order_rule(self, rule: str) -> None:
        """Reads the rows in the order of a rule that a checkpoint records. An unknown rule changes nothing.

        Args:
            rule: the rule, of this release or an earlier one.
        """
        if self._sampler is not None and rule in (LISTED, COMPUTED_RULE):
            self._sampler.order_rule = rule

    def batches_left(self, start: int) -> int | None:
        """Returns the number of micro-batches of an epoch that follow the first `start` rows; None if it is unknown."""
        return None if self._sampler is None else self._sampler.batches_left(start)

    def read(
        self,
        rule: LossRule,
        *,
        start: int = 0,
        epoch: int = 0,
        seed: int = 0,
        last: str | None = None,
        sizes: Iterator[int] | None = None,
    ) -> Iterator[PreparedBatch]:
        """Returns the micro-batches of an epoch in the form that a strategy takes.

        Args:
            rule: the loss rule, which determines how labels are shifted and which label value is ignored.
            start: the number of rows to skip, counted over all data-parallel ranks.
            epoch: the number of the epoch.
            seed: the base seed of the random numbers that are drawn while rows are read.
            last: the digest of the last skipped micro-batch of an iterable data set; None if it is unknown.
            sizes: the numbers of micro-batches of the next optimizer steps, without end; None for 1 each. The rows of a
                step are dealt out at once, see `row_dispatch`.

        Raises:
            TrainingError: FG852 if micro-batches have a fixed size, the last one is or can be short, and the loss
                cannot ignore padding rows; FG960, with the first batches, if the labels are of another task than the
                model's.
        """
        self._refuse_short(rule, start)
        # The loader draws the base seed of its workers from this generator, instead of from the global one.
        self._generator.manual_seed(epoch_seed(seed, epoch) + self.share.rank)
        if self._sampler is not None:
            if self.transformers_seed is not None and not start:
                # The loader of transformers draws the seed of its workers from the global generator once an epoch.
                torch.empty((), dtype=torch.int64).random_()
            self._sampler.set_position(seed=seed, epoch=epoch, start=start)
            return self._ready(iter(self.loader), rule, start, epoch)
        if self.streams is not None:
            return self._ready_rows(
                self.streams.read(seed=seed, epoch=epoch, start=start, sizes=sizes or itertools.repeat(1)), rule
            )
        assert self._stream is not None, "rows have positions, or are a stream"  # noqa: S101
        if start:
            _log.info("reading past %s of a data set without positions", plural(start, "row"))
        # With a digest, the last trained micro-batch is read once more and compared.
        past = start if last is None else max(0, start - self.share.all_rows)
        self._stream.set_position(seed=seed, epoch=epoch, skip=0 if self.workers else past)
        batches: Iterator[Any] = iter(self.loader)
        if self.workers:
            # A loader asks its workers in turn: to continue with the right worker, all earlier micro-batches must be
            # read.
            given = past // self.share.all_rows
            next(itertools.islice(batches, given, given), None)
        else:
            batches = self._stream.read_isolated(batches)
        ready = self._ready(batches, rule, past, epoch)
        return after_matching_batch(ready, last) if last is not None and start else ready

    def _ready(self, batches: Iterator[Any], rule: LossRule, start: int, epoch: int) -> Iterator[PreparedBatch]:
        # Where rows and model meet: other loss rules than those of `ml.losses` may take any labels.
        labels = LabelCheck(getattr(rule, "label_kind", None), getattr(rule, "model_name", ""), self.argument)
        for first in itertools.count(start, self.share.all_rows):
            # For rows that are read in this process; a worker gets the epoch with the row numbers.
            batch: Any = next_in_epoch(batches, epoch, self)
            if batch is self:
                return
            labels.add(batch, rule.ignore_index)
            is_empty = self._sampler is not None and self._sampler.is_empty(first)
            yield self.share.prepare(PaddingBatch(batch) if is_empty else batch, rule)

    def _ready_rows(self, found: Iterator[RankRows], rule: LossRule) -> Iterator[PreparedBatch]:
        labels = LabelCheck(getattr(rule, "label_kind", None), getattr(rule, "model_name", ""), self.argument)
        for rows in found:
            if not isinstance(rows.batch, PaddingBatch):
                labels.add(rows.batch, rule.ignore_index)
            # A step that is not full ends the epoch, and is not computed.
            pads = not self._drops_last
            yield self.share.prepare(rows.batch, rule, pads=pads)._replace(is_last=rows.is_last)

    def _refuse_short(self, rule: LossRule, start: int) -> None:
        # Checked before reading: every process raises now, instead of one of them in the middle of a step.
        if not self.share.fixed or rule.ignore_index is not None or self._drops_last:
            return
        if self._sampler is None:
            raise cannot_pad_streams(self.share.rows)
        if rest := (self._sampler.num_rows - start) % self.share.all_rows:
            raise cannot_pad(rest, self.share.all_rows)


class TrainBatches:
    """The training data as windows (the micro-batches of one optimizer step), and the current position in the data.

    Args:
        dataset: the training data set, either map-style (with a length, and rows by number) or iterable.
        args: the training arguments, whose batch size, gradient accumulation, seeds and loader options are read.
        collate: the collator, a function from a list of rows to a micro-batch.
        topology: the topology of this process, from which the data-parallel rank is read.

    Raises:
        TrainingError: FG803 if there are no rows; FG804 if there are fewer rows than one global micro-batch; FG805 if
            the data has no length and `max_steps` is not set; FG853 if the data is already split among processes; FG946
            if rows are to be grouped by length and have none; FG778 if the order of
            a stream is chosen; FG982 if streamed rows are shuffled that are to be read in order.
    """

    def __init__(self, dataset: Any, args: TrainingArguments, collate: Collate, *, topology: Topology) -> None:
        self.accumulation = args.accumulation
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.epoch = 0
        self.row = 0
        self._latest: Any = None
        self._last: str | None = None
        self._expected: Fingerprint | None = None
        self._may_change = "data" in (args.allow_changed or ())
        self._takes_any_order = args.shuffle_order == AUTO
        self._copies_ahead = args.dataloader_device_prefetch and topology.device.type != "cpu"
        share = RankShare.for_topology(topology, args.per_device_train_batch_size)
        is_grouped = args.train_sampling_strategy == "group_by_length"
        # Of the largest step: the order of the rows of an epoch does not depend on the step that reads them.
        self._group_rows = share.all_rows * self.accumulation.largest if is_grouped else 0
        if not is_iterable(dataset):
            check_size(len(dataset), share)
        elif args.max_steps <= 0:
            raise TrainingError(
                "the training data has no length, and max_steps is not set",
                code="FG805",
                hint="set max_steps, or give a data set with a length",
            )
        elif args.shuffle_order != AUTO:
            raise TrainingError(
                f"shuffle_order is {args.shuffle_order!r}, and a data set without a length is read in its own order",
                code="FG778",
                hint="leave shuffle_order out; a stream is shuffled where it is read",
            ).about("args.shuffle_order")
        elif args.train_sampling_strategy == "sequential" and getattr(dataset, "is_shuffled", False):
            raise TrainingError(
                "train_sampling_strategy is 'sequential', and the streamed rows are shuffled",
                code="FG982",
                hint="set buffer_size: 0 where they are read, for the order of the files",
            ).about("args.train_sampling_strategy")
        self._num_streams, self._drops_last = args.data_streams, args.dataloader_drop_last
        self._own = RankBatches(
            dataset,
            share,
            collate,
            loader_options(args, topology, usual_workers(dataset, collate, topology.device)),
            order=None if args.train_sampling_strategy == "sequential" else self.seed,
            shuffle_order=args.shuffle_order,
            group_rows=self._group_rows,
            drop_last=args.dataloader_drop_last,
            argument="train_dataset",
            draws_apart=False,  # saving and restoring generators would cost each step 0.06 ms
            num_streams=chosen_streams(dataset, args, share.size),
        )
        self._order_seed = self.seed if args.train_sampling_strategy == "transformers_random" else None
        self._own.take_order_of_transformers(self._order_seed)

    @property
    def copies_ahead(self) -> bool:
        """Whether the next window is read, and copied to the accelerator, while the device computes a step."""
        # Rows with numbers that workers read: reading them early draws no number and moves no position.
        return self._copies_ahead and self.num_rows is not None and self._own.workers > 0

    @property
    def may_be_read_early(self) -> bool:
        """Whether reading a window before its step leaves the numbers that the step draws as they are."""
        return self._own.may_be_read_early

    @property
    def loader(self) -> DataLoader[Any]:
        """The `DataLoader` of the training rows."""
        return self._own.loader

    @property
    def has_streams(self) -> bool:
        """Whether the rows are read by virtual streams, so that the windows of a rank end with padding."""
        return self._own.streams is not None

    @property
    def drops_last(self) -> bool:
        """Whether an epoch of virtual streams ends before the first window that is not full."""
        return self._drops_last

    @property
    def bad_rows(self) -> BadRows:
        """The object that counts rows that are left out."""
        return self._own.bad_rows

    @property
    def num_batches(self) -> int | None:
        """The number of micro-batches of an epoch; None if it is unknown."""
        return self._own.batches_left(0)

    @property
    def num_rows(self) -> int | None:
        """The number of rows of an epoch; None if it is unknown."""
        return self._own.num_rows

    @property
    def share(self) -> RankShare:
        """The slice of each micro-batch that this rank computes."""
        return self._own.share

    @property
    def num_retries(self) -> int:
        """The number of reads that failed and were repeated, on this process and its workers."""
        return self._own.retries.count

    @property
    def rows_left_out(self) -> int:
        """The number of rows of an epoch that are not trained on, as an incomplete last micro-batch is left out."""
        return max(0, (self.num_rows or 0) - (self.num_batches or 0) * self.share.all_rows)

    @property
    def batch(self) -> int:
        """The number of micro-batches of the current epoch that were trained on.

        The number is rounded up: in a run that is resumed with another batch size, the position can be within a
        micro-batch.
        """
        return math.ceil(self.row / self._own.share.all_rows)

    def epoch_ends(self) -> Iterator[int] | None:
        """Yields, for each epoch without end, the number of optimizer steps that are done after it.

        Returns None if the number of rows of an epoch is unknown.
        """
        return None if self.num_batches is None else self.accumulation.epoch_ends(self.num_batches)

    @property
    def at_end_of_epoch(self) -> bool:
        """True if no micro-batch of the epoch is left; always False if the length of the data is unknown."""
        return self._own.batches_left(self.row) == 0

    def windows(self, rule: LossRule, *, step: int = 0, padded: bool = False) -> Iterator[Window]:
        """Returns the windows (the micro-batches of each optimizer step) of the epoch, from the current position on.

        Earlier rows are skipped when the data is opened. Skipping does not draw from the run's global random state.

        Args:
            rule: the loss rule, which determines how labels are shifted and which label value is ignored.
            step: the number of optimizer steps that are done, on which the number of micro-batches may depend.
            padded: whether windows of padding follow the last row of this rank, without end, if the rows are read by
                virtual streams, see `RunSync.stream_windows`.
        """
        last, self._last = self._last, None
        sizes = (self.accumulation.at(epoch=self.epoch, step=number) for number in itertools.count(step))
        batches = self._own.read(rule, start=self.row, epoch=self.epoch, seed=self.seed, last=last, sizes=sizes)
        expected, self._expected = self._expected, None
        windows = self._windows(batches, rule, step, padded)
        if self._own.streams is not None:
            return self._compared(windows, self._own.streams)
        return windows if expected is None else after_first(windows, functools.partial(self._compare, expected))

    def _compared(self, windows: Iterator[Window], streams: StreamBatches) -> Iterator[Window]:
        while True:
            try:
                window = next(windows, None)
            except Exception:
                # The error may follow from the change.
                report_data_changes(streams.take_changes(), may_change=self._may_change)
                raise
            report_data_changes(streams.take_changes(), may_change=self._may_change)
            if window is None:
                return
            yield window

    def _compare(self, expected: Fingerprint) -> None:
        report_data_changes(expected.differences(self.fingerprint), may_change=self._may_change)

    def _windows(self, batches: Iterator[PreparedBatch], rule: LossRule, first: int, padded: bool) -> Iterator[Window]:
        for step in itertools.count(first):
            ready = list(itertools.islice(batches, self.accumulation.at(epoch=self.epoch, step=step)))
            if not ready or (ready[-1].is_last and not padded and not any(item.num_rows for item in ready)):
                return
            own, rows, tokens, unpadded, pairs, _, _ = zip(*ready, strict=True)
            yield Window(
                batches=list(own),
                num_valid=_total([rule.count(batch) for batch in own]),
                num_tokens=sum(tokens),
                num_rows=sum(rows),
                num_unpadded=sum(unpadded),
                num_pairs=sum(pairs),
                is_last=ready[-1].is_last,
                is_full=rows.count(self._own.share.rows) == len(rows),
            )

    def same_everywhere(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yields all windows, after comparing the first rows of the iterable data set between processes.

        Collective: every process must iterate over the windows.

        Raises:
            DistributedError: FG855, on every process, if a process reads other rows than rank 0.
        """
        own = functools.partial(refuse_other_data, "the beginning of the training data")
        return after_first(windows, lambda: own(self.fingerprint))

    def rows_of(self, window: Window) -> RowRange:
        """Returns the range of rows of a window (the micro-batches of one optimizer step) at the current position.

        The range includes the rows of all data-parallel ranks.
        """
        return RowRange(self.epoch, self.row, self.row + len(window.batches) * self._own.share.all_rows)

    def advance(self, window: Window) -> None:
        """Moves the current position past the rows of a window, after the model was trained on these rows."""
        self.row += len(window.batches) * self._own.share.all_rows
        if self._own.streams is not None:
            self._own.streams.trained(self.row)
        elif (num_rows := self.num_rows) is None:
            # A stream has no row numbers: after a resume, a digest of this batch shows whether it gives the same rows
            # again.
            self._latest = window.batches[-1]
        else:
            self.row = min(self.row, num_rows)

    def continue_at(self, epoch: int, row: int, *, order_seed: int | None = None) -> None:
        """Sets the position of a run that was begun with transformers' `Trainer`.

        Args:
            epoch: the number of the epoch, counted from 0.
            row: the number of rows of the epoch that were trained on.
            order_seed: the seed with which transformers shuffled, whose order this run keeps; None for our own order.
        """
        self.epoch, self.row = epoch, min(row, self.num_rows or row)
        self._own.take_order_of_transformers(order_seed)

    def next_epoch(self) -> None:
        """Moves the position to the start of the next epoch."""
        self.epoch += 1
        self.row = 0

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the training data, see `RankBatches.fingerprint`."""
        return self._own.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the fingerprint of the data. Collective, if the rows are read by virtual streams.

        For an iterable data set, the state also contains a digest of the last micro-batch.
        """
        position = {"epoch": self.epoch, "row": self.row, "batch": self.batch, **self._facts()}
        if self.num_rows is not None or self.row:
            position["fingerprint"] = self.fingerprint.to_state()
        if self._own.streams is not None:
            streams = self._own.streams
            own = (streams.blocks_at(self.row), streams.num_bad_at(self.row)) if self.row else ({}, 0)
            every = collectives.all_gather((streams.rank, *own))
            # The processes that read a stream say the same; those to which rows are dealt out say nothing.
            blocks = {str(number): block for _, found, _ in every for number, block in found.items()}
            # Processes of one data-parallel rank, as pipeline stages, collate the same rows.
            num_bad = {replica: count for replica, _, count in every}
            return position | {"blocks": blocks, "bad_rows": sum(num_bad.values())}
        if self._latest is None or not self.row:
            return position
        return position | {"last": {"digest": batch_digest(self._latest), **self._own.share.facts}}

    def _facts(self) -> dict[str, Any]:
        own = self._own
        facts: dict[str, Any] = {"num_rows": own.num_rows, "seed": self.seed, "batch_rows": own.share.all_rows}
        facts["update_rows"] = own.share.all_rows * self.accumulation.largest
        if self.accumulation.changes:
            facts["accumulation"] = str(self.accumulation)
        facts["group_rows"] = self._group_rows
        facts["order_rule"] = own.order_rule
        if own.transformers_seed is not None:
            facts["transformers_seed"] = own.transformers_seed
        if own.streams is not None:
            return facts | {"streams": own.streams.facts}
        return facts | ({"workers": own.workers} if own.num_rows is None else {"shuffled": own.is_shuffled})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position of a checkpoint: training continues with the first row that was not trained on.

        Args:
            state: the state that `state_dict` returned, in this release or an earlier one.

        Raises:
            CheckpointError: FG610 if the data changed since the checkpoint was written and must not change. Changed
                rows of an iterable data set are detected later, when the first rows are read.
        """
        # A run that was begun with transformers keeps its order, of which its config says nothing.
        order_seed = None if self._group_rows else state.get("transformers_seed")
        self._own.take_order_of_transformers(order_seed)
        self._read_as_before(state)
        now = self._facts()
        # Facts that an earlier release did not store count as unchanged.
        before = {**now, "streams": None, "group_rows": 0, "order_rule": LISTED, "accumulation": None, **state}
        if before["streams"] and "streams" in now:
            before["streams"] = {**now["streams"], **before["streams"]}
        is_same_reading = before["streams"] == now.get("streams")
        self.epoch, self.row = state["epoch"], state.get("row", state["batch"] * before["batch_rows"])
        self.row = min(self.row, self.num_rows or self.row)
        last = dict(state.get("last", {}))
        digest = last.pop("digest", None)
        # The digest is of a rank-local batch: it can be compared only if this process has the same share of rows.
        self._last = digest if last == self._own.share.facts else None
        known = Fingerprint.from_state(state["fingerprint"]) if "fingerprint" in state else None
        changed = order_changes(before, now)
        if self._order_seed not in (None, order_seed):
            changed.append(f"the order is that of the seed {order_seed} and not transformers_random")
            self._own.take_order_of_transformers(self._order_seed)
        if not is_same_reading:
            # The rows of other streams are in other places, so no row can be compared.
            self._last = None
        elif self._own.streams is not None:
            changed += [] if known is None else self._own.streams.rows.changes_since(known)
            self._own.streams.load_blocks(state.get("blocks", {}), int(state.get("bad_rows", 0)))
        elif self.num_rows is None:
            self._expected = known if known is not None and known.num_rows is None else None
        elif known is None:
            changed += changes_since_earlier_release(has_new_boundaries(self._own.dataset))
        # Other numbers of rows are reported by `order_changes` already.
        elif before["num_rows"] == now["num_rows"]:
            changed += known.differences(self.fingerprint)
        report_data_changes(changed, may_change=self._may_change)
        if not changed and before["accumulation"] != now.get("accumulation"):
            _log.warning(
                "accumulate_grad_batches is %s, and was %s before the checkpoint: the order of the rows is the same, "
                "but other rows make a step",
                now.get("accumulation", "not given"),
                before["accumulation"] or "not given",
            )
        elif not changed and before["update_rows"] != now["update_rows"]:
            _log.warning(
                "an optimizer step uses %s, and used %d before the checkpoint: the order of the rows is the same, "
                "but the steps are the same only if the product of replicas, per_device_train_batch_size and "
                "gradient_accumulation_steps does not change",
                plural(now["update_rows"], "row"),
                before["update_rows"],
            )

    def _read_as_before(self, state: Mapping[str, Any]) -> None:
        """Reads in the order of a checkpoint, or by its virtual streams, if the config does not say another one."""
        if self.num_rows is not None:
            if self._takes_any_order:
                self._own.take_order_rule(state.get("order_rule", LISTED))
            return
        before = int(state.get("streams", {"number": 0})["number"])
        own = 0 if self._own.streams is None else self._own.streams.num_streams
        if before == own or self._num_streams is not None:
            return
        if before == 0:
            _log.warning(
                "the checkpoint is of a run whose processes read all rows of the stream, and this run goes on so: "
                "data_streams in a new run lets each process read its own"
            )
        self._own = self._own.by_streams(before)


def _total(counts: list[Any]) -> Any:
    return counts[0] if len(counts) == 1 else sum(counts)
