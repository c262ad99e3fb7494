"""The data of a script: `DistributedDataLoader`, and what `train` takes over from loaders and data sets.

The input is what a script gives as data; the output is `ScriptData`: the rows, the settings of a trainer that say the
same as the loader, and its collator. What cannot be taken over is refused, because rows in another order would be
another training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from forgather.distributed.arguments import COUNT, FLAG, FUNCTION, Rule, refuse_wrong
from forgather.distributed.script_config import ScriptConfig
from forgather.errors import TrainingError

# More processes than any machine has room for; a seed that all generators take.
_WORKERS: Rule = {"type": "whole", "minimum": 0, "maximum": 10_000}
_SHUFFLE_ORDER: Rule = {"type": "word", "choices": ["auto", "listed", "computed"]}
_SEED: Rule = {"type": "whole", "minimum": 0, "maximum": 2**32 - 1}


@dataclass(frozen=True, kw_only=True)
class ScriptData:
    """What a script gives as training data.

    Args:
        dataset: the rows.
        settings: the training arguments that the loader asks for.
        collate_fn: the collator; None for the default one.
        loader: the name of the loader's class; "" if there is no loader.
    """

    dataset: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    collate_fn: Callable[..., Any] | None = None
    loader: str = ""


class DistributedDataLoader:
    """A loader whose rows are shared between the processes of the run; `train` takes its data set and its settings.

    Iterated in a loop of the user's own, it gives the batches of this process, in the order of a trainer.

    Args:
        dataset: the data set.
        batch_size: the number of rows of a batch of one process.
        num_workers: the number of processes that read and collate rows.
        pin_memory: whether batches are copied to page-locked host memory if there is an accelerator.
        drop_last: whether to omit the last rows of an epoch if they do not fill a batch.
        shuffle: whether the rows are in another order in each epoch.
        seed: the seed of the order of the rows.
        shuffle_order: how the order is found: "listed", "computed", or "auto" for computed above 1,048,576 rows.
        collate_fn: the collator; None for the default one of the trainers, which stacks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        shuffle: bool = True,
        seed: int = 42,
        shuffle_order: str = "auto",
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        rules = {"batch_size": COUNT, "num_workers": _WORKERS, "pin_memory": FLAG, "drop_last": FLAG, "shuffle": FLAG}
        refuse_wrong(locals(), {**rules, "seed": _SEED, "shuffle_order": _SHUFFLE_ORDER, "collate_fn": FUNCTION})
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self._loading = {"num_workers": num_workers, "pin_memory": pin_memory}
        self._order = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "shuffle_order": shuffle_order}
        self._rank_loader: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """The training arguments that say the same as this loader."""
        chosen = self._order["shuffle_order"]
        return {
            **({"shuffle_order": chosen} if chosen != "auto" else {}),
            "per_device_train_batch_size": self.batch_size,
            "dataloader_num_workers": self._loading["num_workers"],
            "dataloader_pin_memory": self._loading["pin_memory"],
            "dataloader_drop_last": self._order["drop_last"],
            "train_sampling_strategy": "random" if self._order["shuffle"] else "sequential",
            "data_seed": self._order["seed"],
        }

    def get_sampler(self) -> Any:
        """Returns the batch sampler, which yields the row numbers of this process and has `set_epoch`."""
        return self._rows.sampler

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def to_config(self) -> str:
        """Returns the text of the config of a trainer that reads the same batches."""
        blocks = {"train_dataset": "!var train_dataset", "model": "!var model"}
        if self.collate_fn is not None:
            blocks["data_collator"] = "!var data_collator"
        return ScriptConfig(name="data", settings=self.settings, blocks=blocks).text

    @property
    def _rows(self) -> Any:
        if self._rank_loader is None:
            # Without an accelerator there is nothing to pin memory for, and torch warns of it.
            pins = self._loading["pin_memory"] and import_module("torch").accelerator.is_available()
            self._rank_loader = import_module("forgather.ml.rank_loader").RankLoader(
                self.dataset,
                self.batch_size,
                collate_fn=self.collate_fn,
                num_workers=self._loading["num_workers"],
                pin_memory=pins,
                **self._order,
            )
        return self._rank_loader


def read_data(data: Any) -> ScriptData:
    """Returns what `train` takes over from a loader or a data set.

    Args:
        data: a `DistributedDataLoader`, a `DataLoader` of torch, or a data set.

    Raises:
        TrainingError: FG811 if a loader has an argument that a trainer cannot take over; FG802 if there are no rows.
    """
    if isinstance(data, DistributedDataLoader):
        return ScriptData(
            dataset=data.dataset, settings=data.settings, collate_fn=data.collate_fn, loader=type(data).__name__
        )
    # Only a script that has imported torch can have one of its loaders.
    if "torch" in sys.modules:
        facts = import_module("forgather.ml.loader_facts")
        if facts.is_loader(data):
            found = facts.loader_facts(data)
            name = type(data).__name__
            return ScriptData(dataset=found.dataset, settings=found.settings, collate_fn=found.collate_fn, loader=name)
    if not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise TrainingError(
            f"the training data is a {type(data).__name__}, which has no rows",
            code="FG802",
            hint="give a data set, a torch DataLoader or a DistributedDataLoader",
        ).about("data_loader")
    return ScriptData(dataset=data)
