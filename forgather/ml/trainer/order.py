"""The order in which rows that have positions are met.

Takes the number of rows, a seed and an epoch; gives, for each micro-batch, the numbers of the rows that are a process's
own. Keeps true: the order of an epoch is a function of seed and epoch alone; the micro-batches of all replicas together
are those of one process with as many rows; the global random state is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from forgather.ml.trainer.draws import SeededRows, seed_of
from forgather.ml.trainer.shares import Share


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
