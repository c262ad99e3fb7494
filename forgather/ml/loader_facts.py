"""What a `DataLoader` of torch asks of a trainer: its rows, its settings, its collator.

The input is a loader; the output is `LoaderFacts`. What a trainer cannot take over, such as a sampler with an order of
its own, is refused by name: rows in another order would be another training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from forgather.errors import TrainingError
from forgather.ml.distributed.env import process_facts

_SUPPORTED = "a DataLoader with shuffle=True, shuffle=False, or a DistributedSampler"
# Torch has no public name for the loader's own defaults of a data set without a length.
_ENDLESS = "_InfiniteConstantSampler"


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What a loader asks of a trainer.

    Args:
        dataset: the data set.
        settings: the training arguments that say the same as the arguments of the loader.
        collate_fn: the collator; None for torch's own, which stacks.
    """

    dataset: Any
    settings: Mapping[str, Any]
    collate_fn: Callable[..., Any] | None


def is_loader(data: Any) -> bool:
    """Returns whether an object is a `DataLoader` of torch."""
    return isinstance(data, DataLoader)


def loader_facts(loader: DataLoader[Any]) -> LoaderFacts:
    """Returns what a loader asks of a trainer.

    Args:
        loader: the loader. Its worker processes must not have been started.

    Raises:
        TrainingError: FG811 if the loader has an argument that a trainer cannot take over.
    """
    kind = type(loader)
    # Accelerate's own only moves batches to a device, as a trainer does.
    if kind.__iter__ is not DataLoader.__iter__ and kind.__module__.partition(".")[0] != "accelerate":
        raise _not_taken("__iter__", f"that of {kind.__name__}", f"change rows in the data set, and give {_SUPPORTED}")
    if loader.batch_sampler is None:
        raise _not_taken("batch_size=None", "batches that the data set itself makes", "let the data set return rows")
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        raise _not_taken("batch_sampler", type(loader.batch_sampler).__name__, f"give {_SUPPORTED}")
    unusual = {
        "timeout": loader.timeout != 0,
        "worker_init_fn": loader.worker_init_fn is not None,
        "multiprocessing_context": loader.multiprocessing_context is not None,
        "in_order": not getattr(loader, "in_order", True),
    }
    for name, is_given in unusual.items():
        if is_given:
            raise _not_taken(name, repr(getattr(loader, name))[:80], f"leave {name} out")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": loader.batch_size,
        "dataloader_drop_last": loader.drop_last,
        "dataloader_num_workers": loader.num_workers,
    }
    # False is torch's default and says nothing; pinned memory changes no number.
    if loader.pin_memory:
        settings["dataloader_pin_memory"] = True
    if loader.num_workers:
        settings["dataloader_persistent_workers"] = loader.persistent_workers
        settings["dataloader_prefetch_factor"] = loader.prefetch_factor
    if not isinstance(loader.dataset, IterableDataset):
        settings["train_sampling_strategy"] = _order(loader)
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    return LoaderFacts(loader.dataset, settings, own)


def _order(loader: DataLoader[Any]) -> str:
    """Returns the name of the order of the rows: "random" or "sequential"."""
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler._num_samples is not None:
            raise _not_taken("sampler", "a RandomSampler with replacement or num_samples", f"give {_SUPPORTED}")
        if sampler.generator is not None:
            raise _not_taken(
                "generator", "an order of its own", "leave it out, and set seed or data_seed in the config"
            )
        return "random"
    if type(sampler) is DistributedSampler:
        found, started = sampler.num_replicas, process_facts().world_size
        if found != started:
            raise _not_taken("sampler", f"for {found} processes of {started}", "give num_replicas the number of all")
        if sampler.seed:
            raise _not_taken(
                "sampler", f"one with seed={sampler.seed}", "leave it out, and set data_seed in the config"
            )
        if sampler.drop_last:
            raise _not_taken("sampler", "one with drop_last=True", "give drop_last to the DataLoader")
        return "random" if sampler.shuffle else "sequential"
    raise _not_taken("sampler", type(sampler).__name__, f"give {_SUPPORTED}")


def _not_taken(name: str, found: str, hint: str) -> TrainingError:
    return TrainingError(
        f"the data loader's {name} is {found}, which a trainer does not take over", code="FG811", hint=hint
    ).about("data_loader")
