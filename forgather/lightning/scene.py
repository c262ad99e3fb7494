"""What the loops of a module share: the module, its hooks, its logged values, the limits, and where the run is.

`Scene` is made for each call of `fit`, `validate`, `test` or `predict`. `Limits` are the words of Lightning that change
how many batches are read, and when validation runs; they have no counterpart among our settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.lightning.hooks import Hooks, unsupported
from forgather.lightning.logged import LoggedValues, Metrics
from forgather.ml.strategy.base import Strategy

_PER_STAGE = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True)
class Limits:
    """How many batches are read, and when validation runs; the names and defaults are Lightning's.

    Args:
        fast_dev_run: the number of batches of each stage of a trial run; true is 1, and 0 or false a whole run.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: the number of batches of a
            loader, or the share of them.
        overfit_batches: the number, or share, of training batches of an epoch that are always the same.
        val_check_interval: after how many training batches validation runs, or after which share of an epoch.
        check_val_every_n_epoch: in which epochs it runs; None counts the batches of all epochs.
        num_sanity_val_steps: the number of validation batches that are tried before training; -1 is all.
        log_every_n_steps: after how many optimizer steps values are given to trackers.
        min_epochs, min_steps: what a run does at least, whatever sets `should_stop`.
        max_epochs: what a run does at most, in addition to its number of steps; None for no such limit.
        use_distributed_sampler: whether the sampler of a loader is replaced on several ranks.
        gradient_clip_value: the largest absolute value of an entry of the gradients; None leaves them.
    """

    fast_dev_run: int | bool = False
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    min_epochs: int | None = None
    min_steps: int | None = None
    max_epochs: int | None = None
    use_distributed_sampler: bool = True
    gradient_clip_value: float | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Returns the limits that words set; None means "not given", except for `check_val_every_n_epoch`.

        Raises:
            TrainingError: FG865 if a value is no number in its range.
        """
        names = {part.name for part in fields(cls)}
        found = cls(
            **{name: of for name, of in given.items() if name in names and (of is not None or name.startswith("check"))}
        )
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
            _check_share(name, getattr(found, name))
        for name in ("overfit_batches", "val_check_interval"):
            _check_share(name, getattr(found, name))
        return found.effective()

    def effective(self) -> Self:
        """Returns the limits with those that `fast_dev_run` and `overfit_batches` set, as in Lightning."""
        found = self
        if batches := int(self.fast_dev_run):
            found = replace(
                found,
                limit_train_batches=batches,
                limit_val_batches=batches,
                limit_test_batches=batches,
                limit_predict_batches=batches,
                num_sanity_val_steps=0,
                max_epochs=1,
                val_check_interval=1.0,
                check_val_every_n_epoch=1,
            )
        if self.overfit_batches:
            found = replace(found, limit_train_batches=self.overfit_batches, limit_val_batches=self.overfit_batches)
        return found

    def of(self, stage: str) -> tuple[int | float, str]:
        """Returns the limit of a stage, and the word that sets it."""
        word = f"limit_{_PER_STAGE[stage]}_batches"
        return getattr(self, word), word


def _check_share(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or (isinstance(value, float) and value > 1):
        raise unsupported(f"{name} is {value!r}", "give a whole number of batches, or a share from 0.0 to 1.0")


@dataclass
class Scene:
    """The state that the loops of a module share.

    Args:
        trainer: the object that hooks get as the trainer.
        module: the module.
        hooks: the hooks of the callbacks and of the module.
        limits: how many batches are read.
        strategy: the strategy, once it is built.
        stage: what runs now: "train", "sanity", "validate", "test" or "predict"; "" for nothing.
        epoch: the number of the epoch, from 0.
        steps: the number of optimizer steps that are done.
        metrics: the newest metrics.
        should_stop: whether a callback, or the module, wants the run to end.
    """

    trainer: Any
    module: nn.Module
    hooks: Hooks
    limits: Limits
    strategy: Strategy | None = None
    stage: str = ""
    epoch: int = 0
    steps: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    should_stop: bool = False

    def __post_init__(self) -> None:
        self._values: dict[str, LoggedValues] = {}

    @property
    def values(self) -> LoggedValues:
        """The values that the hooks of the present stage log."""
        if self.stage not in self._values:
            several = self.strategy is not None and self.strategy.topology.dp_size > 1
            self._values[self.stage] = LoggedValues(
                is_training=self.stage == "train", reduce=self.reduced if several else None
            )
        return self._values[self.stage]

    def take_metrics(self) -> Metrics:
        """Returns the metrics of the present stage, and keeps them as the newest ones."""
        found = self.values.metrics()
        self.metrics.update(found)
        return found

    @torch.no_grad()
    def reduced(self, value: Tensor, how: str) -> Tensor:
        """Returns the sum, the maximum or the minimum of a tensor over all data-parallel ranks. Collective.

        Args:
            value: the tensor of this rank.
            how: "sum", "max" or "min".
        """
        assert self.strategy is not None, "logging begins when the strategy is built"  # noqa: S101
        if how == "sum":
            return torch.as_tensor(self.strategy.reduce(value.clone()))
        found = value.clone()
        dist.all_reduce(found, op={"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[how])
        return found
