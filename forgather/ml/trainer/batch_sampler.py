"""Batch sampler and collator for the rank-local rows of each micro-batch, and padding rows for short micro-batches.

A global micro-batch is the rows of one micro-batch over all data-parallel ranks. The order of its rows does not depend
on the number of processes, and every row is computed by exactly one data-parallel rank. A rank without rows gets one
padding row, which is excluded from the loss and from all counts, because every rank must take part in the collectives.
If all micro-batches must have the same size (pipelines), padding rows are appended whose labels are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from forgather.errors import TrainingError
from forgather.ml.batch_sizes import batch_sizes, num_rows
from forgather.ml.documents import Documents
from forgather.ml.losses import LossRule, labels_of
from forgather.ml.model_inputs import DOCUMENTS, SHIFTED
from forgather.ml.number_format import plural
from forgather.ml.trainer.data_rng import SeededRows, seed_of
from forgather.ml.trainer.length_groups import LengthGroups
from forgather.ml.trainer.row_order import LISTED, ComputedOrder
from forgather.ml.types import MAPPINGS, PaddingBatch, Topology

Row = TypeVar("Row")


class PreparedBatch(NamedTuple):
    """A micro-batch in the form that a strategy takes, with the numbers of its rows and tokens.

    Args:
        batch: the micro-batch, with shifted labels, and with padding rows if micro-batches have a fixed size.
        num_rows: the number of rows without padding rows.
        num_tokens: the number of input tokens in these rows.
        num_unpadded: the number of these tokens that are no padding.
        num_pairs: the number of pairs of these tokens in the same document; 0 if documents are not known.
        collated: the micro-batch as the collator returned it, without padding rows and with unshifted labels.
        is_last: whether this rank has no further row in the epoch; only the micro-batches of virtual streams say so.
    """

    batch: Any
    num_rows: int
    num_tokens: int
    num_unpadded: int
    num_pairs: int
    collated: Any
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class RankShare:
    """The slice of each global micro-batch that one data-parallel rank computes.

    Args:
        rows: the number of rows of one micro-batch on one data-parallel rank.
        rank: the data-parallel rank.
        size: the number of data-parallel ranks.
        fixed: whether every micro-batch must have exactly `rows` rows.

    Example:
        >>> [RankShare(2, rank, 3).local_rows([7, 8, 9]) for rank in range(3)]
        [[7, 8], [9], []]
    """

    rows: int
    rank: int = 0
    size: int = 1
    fixed: bool = False

    @classmethod
    def for_topology(cls, topology: Topology, rows: int) -> RankShare:
        """Returns the share of the process that a topology describes.

        Args:
            topology: the topology of the process, from which the data-parallel rank, the number of data-parallel ranks
                and whether micro-batches have a fixed size are read.
            rows: the number of rows of one micro-batch on one data-parallel rank.
        """
        return cls(rows, topology.dp_rank, topology.dp_size, topology.fixed_rows)

    @property
    def all_rows(self) -> int:
        """The number of rows of one global micro-batch, over all data-parallel ranks."""
        return self.rows * self.size

    @property
    def facts(self) -> dict[str, int]:
        """The fields `rows`, `rank` and `size` by name, as a checkpoint stores them."""
        return {"rows": self.rows, "rank": self.rank, "size": self.size}

    def local_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rank-local rows of a global micro-batch; an empty list if it has too few rows for this rank."""
        return list(rows[self.rank * self.rows : (self.rank + 1) * self.rows])

    def prepare(self, batch: Any, rule: LossRule, *, pads: bool = True) -> PreparedBatch:
        """Returns a micro-batch in the form that a strategy takes: labels are shifted, and a short batch is padded.

        Padding rows are added only if micro-batches have a fixed size.

        Args:
            batch: the collated rows of this rank.
            rule: the loss rule, which determines how labels are shifted and which label value is ignored.
            pads: whether a short batch is padded, if micro-batches have a fixed size.

        Raises:
            TrainingError: FG852 if the batch is short and the loss cannot ignore padding rows.
        """
        # Counted before padding: throughput and the loss must not see rows that were added.
        sizes = batch_sizes(batch)
        collated = whole = batch.batch if isinstance(batch, PaddingBatch) else batch
        if self.fixed and pads and sizes.rows != self.rows:
            batch = ignore_padding_labels(pad_rows(whole, self.rows), rule, sizes.rows)
        ready = rule.prepared(batch)
        return PreparedBatch(ready, *sizes, _num_pairs(ready, sizes.rows), collated)


def _num_pairs(batch: Any, kept: int) -> int:
    documents: Documents | None = batch.get(DOCUMENTS) if isinstance(batch, MAPPINGS) else None
    if documents is None:
        return 0
    return (documents if documents.rows == kept else documents[:kept]).num_pairs


class RankCollator:
    """A collator that passes only the rank-local rows of a global micro-batch to another collator."""

    def __init__(self, collate: Callable[[list[Any]], Any], share: RankShare) -> None:
        self.collate = collate
        self.share = share

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the rank-local micro-batch of a global one; a `PaddingBatch` if this rank has no rows."""
        own = self.share.local_rows(rows)
        # Without own rows, a row of another rank: the batch must have the shapes and keys of a real one, because the
        # rank takes part in the collectives of the forward pass.
        return self.collate(own) if own else PaddingBatch(self.collate(rows[:1]))


def pad_rows(batch: Any, rows: int) -> Any:
    """Returns the batch, padded to `rows` rows by appending copies of its first row.

    Args:
        batch: the batch: a tensor, or a mapping or sequence of tensors.
        rows: the number of rows of the result.

    Shapes:
        A tensor whose first dimension is the number of rows of the batch becomes (`rows`, ...). Other items do not
        change.
    """
    present = num_rows(batch)

    def longer(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.ndim == 0 or item.shape[0] != present:
            return item
        # A real row is repeated: made-up values need not be valid inputs of the model.
        return torch.cat([item, item[:1].expand(rows - present, *item.shape[1:])])

    if isinstance(batch, Mapping):
        return {name: longer(item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(longer(item) for item in batch)
    return longer(batch)


def ignore_padding_labels(batch: Any, rule: LossRule, kept: int) -> Any:
    """Returns the batch with the labels of all rows after the first `kept` ones set to the ignore index.

    Args:
        batch: a batch with labels, which may be shifted already.
        rule: the loss rule, whose `ignore_index` is the label value that the loss ignores.
        kept: the number of rows at the beginning of the batch that are not padding.

    Shapes:
        labels: (B, ...) of integers, B rows. The result has the same shapes.

    Raises:
        TrainingError: FG852 if labels are missing or floating point, or if the loss has no ignore index.
    """
    labels = batch.get(SHIFTED, labels_of(batch)) if isinstance(batch, Mapping) else labels_of(batch)
    if labels is None or labels.is_floating_point() or rule.ignore_index is None:
        raise cannot_pad(kept, num_rows(batch))
    # Not in place: the given batch keeps its labels.
    ignored = labels.clone()
    ignored[kept:] = rule.ignore_index
    if isinstance(batch, Mapping):
        return {name: ignored if item is labels else item for name, item in batch.items()}
    return type(batch)([*batch[:-1], ignored])


def cannot_pad(present: int, needed: int) -> TrainingError:
    """Returns the FG852 error for a short micro-batch that cannot be padded.

    Args:
        present: the number of rows of the micro-batch.
        needed: the number of rows that every micro-batch must have.
    """
    return TrainingError(
        f"the last micro-batch has {present} of {needed} rows; each one must have {needed} here, and this loss cannot "
        "ignore padding rows",
        code="FG852",
        hint="set dataloader_drop_last: true, a batch size that divides the number of rows, or a loss of whole-number "
        "labels with an ignore_index",
    )


def cannot_pad_streams(needed: int) -> TrainingError:
    """Returns the FG852 error for rows of unknown number whose last micro-batches cannot be padded.

    Args:
        needed: the number of rows that every micro-batch of a rank must have.
    """
    return TrainingError(
        "the number of training rows is not known, so an epoch can end with a short micro-batch; each one must have "
        f"{plural(needed, 'row')} on a rank here, and this loss cannot ignore padding rows",
        code="FG852",
        hint="set dataloader_drop_last: true, or a loss of whole-number labels with an ignore_index",
    )


class RankBatchSampler(Sampler[list[int]]):
    """A batch sampler that yields the rank-local row numbers of each micro-batch of one epoch, starting at any row.

    Args:
        num_rows: the number of rows of the data set.
        share: the slice of each global micro-batch that this process computes.
        order: the seed of the shuffling; None keeps the order of the data set.
        groups: the lengths by which rows are grouped after shuffling; None for rows in a random order.
        drop_last: whether to omit an incomplete last micro-batch.
        carry_seeds: whether to attach a seed to each micro-batch, from which the data set and the collator draw random
            numbers, see `SeededDataset`.
    """

    def __init__(
        self,
        num_rows: int,
        share: RankShare,
        *,
        order: int | None,
        groups: LengthGroups | None = None,
        drop_last: bool,
        carry_seeds: bool = True,
    ) -> None:
        self.num_rows = num_rows
        self.share = share
        self.order = order
        self.groups = groups
        self.drop_last = drop_last
        self.carry_seeds = carry_seeds
        self.order_rule = LISTED
        """The rule of the shuffled order, of `row_order`, as a checkpoint records it."""
        self.transformers_seed: int | None = None
        """The seed with which transformers shuffles, in a run that goes on with its order; None for our own order."""
        self.set_position()

    def set_position(self, *, seed: int = 0, epoch: int = 0, start: int = 0) -> None:
        """Sets the position at which the next iteration begins.

        Args:
            seed: the base seed of the random numbers that are drawn while rows are read.
            epoch: the number of the epoch, which determines the order of the rows.
            start: the number of rows to skip, counted over all data-parallel ranks.
        """
        self.seed = seed
        self.epoch = epoch
        self.start = start

    def __len__(self) -> int:
        return self.batches_left(0)

    def batches_left(self, start: int) -> int:
        """Returns the number of micro-batches of the epoch that follow the first `start` rows."""
        whole, rest = divmod(self.num_rows - start, self.share.all_rows)
        return whole if self.drop_last else whole + bool(rest)

    def __iter__(self) -> Iterator[list[int]]:
        # Every process knows the order of the whole epoch, and so the rows of all ranks without communication.
        order: Sequence[int] | ComputedOrder = range(self.num_rows)
        if self.order is not None:
            order = self._computed(self.order) if self.is_computed else self._shuffled(self.order)
        size, replica = self.share.all_rows, self.share.rank
        number = self.batches_left(self.start)
        # From `start`, not from a multiple of `size`: a run resumed with another batch size begins in between.
        firsts = range(self.start, self.start + number * size, size)
        own_rows = self._own_rows(order, firsts)
        for first, rows in zip(firsts, own_rows, strict=True):
            # A loader cannot give an empty batch; `RankBatches` marks this row as padding with `is_empty`.
            own = rows or list(order[first : first + 1])
            seed = seed_of(self.seed, self.epoch, first, replica) if self.carry_seeds else 0
            yield SeededRows(own, seed, self.epoch) if self.carry_seeds else own

    def _own_rows(self, order: Sequence[int] | ComputedOrder, firsts: range) -> Iterator[list[int]]:
        """Yields the rows of this rank in the micro-batches that begin at `firsts`; an empty list if it has none."""
        rows, before = self.share.rows, self.share.rank * self.share.rows
        if isinstance(order, ComputedOrder):
            return order.micro_batches(firsts.start + before, step=firsts.step, size=rows, number=len(firsts))
        return (list(order[first + before : first + before + rows]) for first in firsts)

    @property
    def is_computed(self) -> bool:
        """True if the order of an epoch is computed for the rows that are asked for, and never listed."""
        # Lengths are listed anyway, and the order of transformers is what its own list is.
        is_listed = self.groups is not None or self.transformers_seed is not None
        return self.order is not None and self.order_rule != LISTED and not is_listed

    def _computed(self, seed: int) -> ComputedOrder:
        return ComputedOrder(self.num_rows, epoch_seed(seed, self.epoch))

    def is_empty(self, first: int) -> bool:
        """Returns whether this rank has no rows in the global micro-batch that begins at row `first`.

        A rank without rows reads a row of another rank as padding.
        """
        return self.num_rows <= first + self.share.rank * self.share.rows

    def _shuffled(self, seed: int) -> list[int]:
        # A generator of its own: shuffling must not depend on, or change, the global random state.
        if self.transformers_seed is not None:
            return _order_of_transformers(self.transformers_seed, self.epoch, self.num_rows)
        generator = torch.Generator().manual_seed(epoch_seed(seed, self.epoch))
        if self.groups is not None:
            return self.groups.order(generator)
        return torch.randperm(self.num_rows, generator=generator).tolist()


def _order_of_transformers(seed: int, epoch: int, num_rows: int) -> list[int]:
    """Returns the order of the rows of an epoch under transformers' `Trainer` with a random sampler.

    Source:
        `accelerate.data_loader.SeedableRandomSampler`, which transformers uses by default.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of one epoch. Different pairs of seed and epoch, in practical ranges, give different seeds.

    Args:
        seed: the seed of the shuffling.
        epoch: the number of the epoch.
    """
    # `seed + epoch` would give (1, 2) and (2, 1) the same order; odd 64-bit constants keep the pairs apart.
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 1) % (2**63)
