"""Which rows of a micro-batch are this process's own, and what stands in for rows that are missing.

Takes the micro-batch of all processes, in one order that no number of processes changes; gives the part that one
data-parallel rank computes. Keeps true: each row is computed by exactly one rank; a rank without rows computes one that
counts for nothing, so that every rank takes part in what all do together; where micro-batches must be of one size,
what fills them up has labels that are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from forgather.errors import TrainingError
from forgather.ml.losses import LossRule, labels_of, num_rows, num_tokens
from forgather.ml.model_inputs import SHIFTED
from forgather.ml.trainer.data_rng import SeededRows, seed_of
from forgather.ml.types import PaddingBatch, Topology

Row = TypeVar("Row")


class Ready(NamedTuple):
    """A micro-batch as a strategy gets it, and what it holds without rows that fill it up.

    Args:
        batch: labels shifted, and filled up where the size is fixed.
        num_rows: rows that count.
        num_tokens: their input tokens.
    """

    batch: Any
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each micro-batch that one process computes.

    Args:
        rows: rows of one micro-batch of one replica.
        rank: which replica this is.
        size: number of replicas.
        fixed: True where every micro-batch of a replica must have `rows` rows.

    Example:
        >>> [Share(2, rank, 3).of([7, 8, 9]) for rank in range(3)]
        [[7, 8], [9], []]
    """

    rows: int
    rank: int = 0
    size: int = 1
    fixed: bool = False

    @classmethod
    def by(cls, topology: Topology, rows: int) -> Share:
        """Returns the share of a process in micro-batches of `rows` rows a replica."""
        return cls(rows, topology.dp_rank, topology.dp_size, topology.fixed_rows)

    @property
    def all_rows(self) -> int:
        """Rows of one micro-batch of all replicas."""
        return self.rows * self.size

    @property
    def facts(self) -> dict[str, int]:
        """Which rows of which micro-batches these are, as plain numbers."""
        return {"rows": self.rows, "rank": self.rank, "size": self.size}

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Returns this process's part of the rows of a micro-batch of all replicas."""
        return list(rows[self.rank * self.rows : (self.rank + 1) * self.rows])

    def ready(self, batch: Any, rule: LossRule) -> Ready:
        """Returns a batch as the strategy gets it: labels shifted, and filled up where the size is fixed.

        Raises:
            TrainingError: FG852 for rows to fill up whose labels cannot be ignored.
        """
        kept, tokens = num_rows(batch), num_tokens(batch)
        if self.fixed and kept != self.rows:
            whole = batch.batch if isinstance(batch, PaddingBatch) else batch
            batch = ignoring(filled_up(whole, self.rows), rule, kept)
        return Ready(rule.prepared(batch), kept, tokens)


class OwnRows:
    """A collator that gives another collator this process's part of the rows of all."""

    def __init__(self, collate: Callable[[list[Any]], Any], share: Share) -> None:
        self.collate = collate
        self.share = share

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of this process."""
        own = self.share.of(rows)
        return self.collate(own) if own else PaddingBatch(self.collate(rows[:1]))


def filled_up(batch: Any, rows: int) -> Any:
    """Returns a batch of `rows` rows: the first one is repeated at the end."""
    present = num_rows(batch)

    def longer(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.ndim == 0 or item.shape[0] != present:
            return item
        return torch.cat([item, item[:1].expand(rows - present, *item.shape[1:])])

    if isinstance(batch, Mapping):
        return {name: longer(item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(longer(item) for item in batch)
    return longer(batch)


def ignoring(batch: Any, rule: LossRule, kept: int) -> Any:
    """Returns a batch in which the labels of all rows but the first `kept` are ignored.

    Raises:
        TrainingError: FG852 where there are no such labels.
    """
    labels = batch.get(SHIFTED, labels_of(batch)) if isinstance(batch, Mapping) else labels_of(batch)
    if labels is None or labels.is_floating_point() or rule.ignore_index is None:
        raise cannot_fill_up(kept, num_rows(batch))
    ignored = labels.clone()
    ignored[kept:] = rule.ignore_index
    if isinstance(batch, Mapping):
        return {name: ignored if item is labels else item for name, item in batch.items()}
    return type(batch)([*batch[:-1], ignored])


def cannot_fill_up(present: int, needed: int) -> TrainingError:
    """Returns the error for a short micro-batch that cannot be filled up with rows that count for nothing."""
    return TrainingError(
        f"the last micro-batch has {present} of {needed} rows, each one must have {needed} here, and rows that fill it "
        "up cannot be left out of this loss",
        code="FG852",
        hint="set dataloader_drop_last: true, a batch size that divides the number of rows, or a loss of whole-number "
        "labels with an ignore_index",
    )


class EpochBatches(Sampler[list[int]]):
    """This process's rows of each micro-batch of one epoch, from any row on.

    Args:
        num_rows: rows of the data set.
        share: the part of a micro-batch that is this process's own.
        order: seed of the shuffling; None keeps the order of the data.
        drop_last: leave out a last micro-batch that is not full.
        carry_seeds: whether what rows draw is to follow from their numbers, see `Rows`.
    """

    def __init__(
        self, num_rows: int, share: Share, *, order: int | None, drop_last: bool, carry_seeds: bool = True
    ) -> None:
        self.num_rows = num_rows
        self.share = share
        self.order = order
        self.drop_last = drop_last
        self.carry_seeds = carry_seeds
        self.place()

    def place(self, *, seed: int = 0, epoch: int = 0, start: int = 0) -> None:
        """Says where the next iteration begins.

        Args:
            seed: of what rows draw.
            epoch: whose order it is.
            start: rows of all processes that came before.
        """
        self.seed = seed
        self.epoch = epoch
        self.start = start

    def __len__(self) -> int:
        return self.left(0)

    def left(self, start: int) -> int:
        """Returns the number of micro-batches after the first `start` rows."""
        whole, rest = divmod(self.num_rows - start, self.share.all_rows)
        return whole if self.drop_last else whole + bool(rest)

    def __iter__(self) -> Iterator[list[int]]:
        order = range(self.num_rows) if self.order is None else self._shuffled(self.order)
        size, replica = self.share.all_rows, self.share.rank
        for number in range(self.left(self.start)):
            first = self.start + number * size
            rows = order[first : first + size]
            own = self.share.of(rows) or [rows[0]]
            yield SeededRows(own, seed_of(self.seed, self.epoch, first, replica)) if self.carry_seeds else own

    def is_empty(self, first: int) -> bool:
        """Tells whether no row of the micro-batch that begins at row `first` is this process's own.

        It reads one of another process then.
        """
        return self.num_rows <= first + self.share.rank * self.share.rows

    def _shuffled(self, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(epoch_seed(seed, self.epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch; different epochs and different seeds do not meet."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + 1) % (2**63)
