"""`RankLoader`: the batches that a trainer would give to this process, for a training loop of the user's own.

The order of the rows is that of a trainer with the same seed, and each process gets its own rows of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from forgather.errors import TrainingError
from forgather.ml.distributed.env import process_facts
from forgather.ml.trainer.batch_sampler import RankBatchSampler, RankShare
from forgather.ml.trainer.collation import default_collate
from forgather.ml.trainer.row_order import AUTO, order_rule


class EpochBatchSampler(RankBatchSampler):
    """A batch sampler whose epoch is set as that of torch's `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, which determines the order of the rows.

        Args:
            epoch: the number of the epoch, from 0.
        """
        self.set_position(epoch=epoch)


class RankLoader:
    """An iterable of the micro-batches of this process.

    Args:
        dataset: a data set with a length, which returns rows by number.
        batch_size: the number of rows of a batch of one process.
        shuffle: whether the rows are in another order in each epoch.
        seed: the seed of the order.
        shuffle_order: the training argument of that name: "auto", "listed" or "computed".
        drop_last: whether to omit the last rows of an epoch if they do not fill a batch of all processes.
        collate_fn: the collator; None for the default one of the trainers.
        loading: further arguments of torch's `DataLoader`.

    Raises:
        TrainingError: FG803 if the data set has no length.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        shuffle_order: str = AUTO,
        **loading: Any,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TrainingError(
                f"{type(dataset).__name__} has no length, and rows are shared between processes by number",
                code="FG803",
                hint="give a data set with __len__ and __getitem__, or give this one to train()",
            ).about("dataset")
        facts = process_facts()
        share = RankShare(batch_size, facts.rank, facts.world_size)
        order = seed if shuffle else None
        self.sampler = EpochBatchSampler(len(dataset), share, order=order, drop_last=drop_last, carry_seeds=False)
        self.sampler.order_rule = order_rule(shuffle_order, len(dataset))
        collate = default_collate(None) if collate_fn is None else collate_fn
        self._loader = DataLoader(dataset, batch_sampler=self.sampler, collate_fn=collate, **loading)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)
