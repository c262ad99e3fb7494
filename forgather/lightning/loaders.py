"""The loaders of a stage: how many batches of each are read, and which rows each rank reads.

The input is what a user gives or a `*_dataloader` hook returns; the output is a list of loaders. On several ranks, the
sampler of a `DataLoader` is replaced by a `DistributedSampler`, as in Lightning: it shuffles by the seed and the epoch,
and repeats rows so that all ranks have the same number of batches. Predictions are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from forgather.lightning.hooks import unsupported
from forgather.lightning.seeds import given_seed
from forgather.ml.distributed import collectives
from forgather.ml.types import Topology


class Unrepeated(Sampler[int]):
    """The rows of one rank, every so many of them, without repeated ones.

    Args:
        size: the number of rows.
        rank: the rank.
        ranks: the number of ranks.
    """

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        self._rows = range(rank, size, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def several(found: Any) -> list[Any]:
    """Returns the loaders in what a user gave: one loader, a list of them, or None.

    Raises:
        TrainingError: FG865 if it is a mapping of loaders.
    """
    if isinstance(found, Mapping):
        raise unsupported("the data is a mapping of loaders", "give a list of loaders")
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def prepared(loader: Any, stage: str, topology: Topology, *, replaces: bool = True, overfits: bool = False) -> Any:
    """Returns a loader that gives this rank its rows.

    Args:
        loader: the loader of all rows.
        stage: "train", "validate", "test" or "predict".
        topology: the position of this rank.
        replaces: whether the sampler is replaced on several ranks (`use_distributed_sampler`).
        overfits: whether the same rows are read in each epoch, so that shuffling is turned off.

    Raises:
        TrainingError: FG865 if the batches of the loader cannot be distributed.
    """
    if not hasattr(loader, "__iter__"):
        raise unsupported(f"a loader is a {type(loader).__name__}", "give a torch.utils.data.DataLoader")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if overfits and not isinstance(loader.sampler, SequentialSampler):
        loader = _with_sampler(loader, SequentialSampler(_sized(loader)))
    if topology.dp_size == 1 or not replaces or isinstance(loader.sampler, DistributedSampler):
        return loader
    if stage == "predict":
        return _with_sampler(loader, Unrepeated(len(_sized(loader)), topology.dp_rank, topology.dp_size))
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise unsupported(
            f"the loader has the sampler {type(loader.sampler).__name__}, and {topology.dp_size} ranks share its rows",
            "give use_distributed_sampler=False, and a sampler that gives each rank its own rows",
        )
    shuffles = not overfits and (stage == "train" or isinstance(loader.sampler, RandomSampler))
    sampler: Sampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=topology.dp_size,
        rank=topology.dp_rank,
        shuffle=shuffles,
        seed=given_seed() or 0,
    )
    return _with_sampler(loader, sampler)


def _sized(loader: DataLoader[Any]) -> Any:
    return loader.dataset


def _with_sampler(loader: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise unsupported(
            f"the loader has the batch sampler {type(loader.batch_sampler).__name__}, which cannot be replaced",
            "give batch_size and sampler in its place",
        )
    if type(loader) is not DataLoader:
        raise unsupported(
            f"the loader is a {type(loader).__name__}, whose sampler cannot be replaced",
            "give a torch.utils.data.DataLoader, or use_distributed_sampler=False with a sampler of each rank",
        )
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    options = {name: getattr(loader, name) for name in names}
    options["multiprocessing_context"] = loader.multiprocessing_context
    if loader.batch_size is not None:
        options["drop_last"] = loader.drop_last
    if loader.num_workers:
        options |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    # Not in all releases of torch, or deprecated in newer ones.
    newer = {"pin_memory_device": "", "in_order": True}
    options |= {name: given for name, usual in newer.items() if (given := getattr(loader, name, usual)) != usual}
    return DataLoader(loader.dataset, sampler=sampler, **options)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells the samplers of a loader the number of the epoch, which their order depends on.

    Args:
        loader: the loader.
        epoch: the number of the epoch.
    """
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    told: list[Any] = []
    sampler: Any
    for sampler in (getattr(loader, "sampler", None), inner):
        if callable(getattr(sampler, "set_epoch", None)) and not any(sampler is one for one in told):
            sampler.set_epoch(epoch)
            told.append(sampler)


def length(loader: Any) -> int | None:
    """Returns the number of batches of a loader; None if it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def require_equal_counts(counts: Sequence[int | None], what: str) -> None:
    """Raises an error on every rank if one has another number of batches. Collective: every rank must call it.

    Args:
        counts: the number of batches of each loader of this rank; None if it is unknown.
        what: what has these batches, for the message.

    Raises:
        TrainingError: FG865 if the numbers differ.
    """
    found = collectives.all_gather(list(counts))
    if any(of != found[0] for of in found):
        numbers = ", ".join(" and ".join(map(str, of)) for of in found)
        raise unsupported(
            f"{what} has {numbers} batches on the ranks, and the first ones to end would leave the others waiting",
            "give each rank the same number of batches, by drop_last or limit_train_batches for example",
        )


def limited(batches: int | None, limit: int | float, word: str) -> int | None:
    """Returns how many batches are read under a limit: a whole number of them, or a share of all.

    Args:
        batches: the number of batches; None if it is unknown.
        limit: the limit.
        word: the name of the limit in messages.

    Raises:
        TrainingError: FG865 if a share is smaller than one batch, or of an unknown number.

    Example:
        >>> limited(10, 0.5, "limit_val_batches"), limited(10, 3, "limit_val_batches")
        (5, 3)
    """
    if isinstance(limit, int):
        return limit if batches is None else min(batches, limit)
    if batches is None:
        if limit != 1.0:
            raise unsupported(f"{word} is {limit}, and the loader has no length", "give a whole number of batches")
        return None
    if batches and limit and int(batches * limit) == 0:
        raise unsupported(
            f"{word} is {limit}, which is less than one of {batches} batches",
            f"give {math.ceil(1e4 / batches) / 1e4:g} or more",
        )
    return int(batches * limit)
