"""What the loops of a module share: the module, its hooks, its logged values, the limits, and where the run is.

`Scene` is made for each module. `Limits` say how many batches are read, and when validation runs; they have no
counterpart among our settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather.lightning.hooks import Hooks
from forgather.lightning.logged import LoggedValues, Metrics, on_host
from forgather.lightning.trainer_words import Limits
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy

_PER_STAGE = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}


def effective(limits: Limits) -> Limits:
    """Returns the limits with those that `overfit_batches` sets, as in Lightning."""
    if not limits.overfit_batches:
        return limits
    share = limits.overfit_batches
    return replace(limits, limit_train_batches=share, limit_val_batches=share)


def limit_of(limits: Limits, stage: str) -> tuple[int | float, str]:
    """Returns the limit of a stage, and the word that sets it.

    Args:
        limits: the limits.
        stage: "train", "validate", "test" or "predict".
    """
    word = f"limit_{_PER_STAGE[stage]}_batches"
    return getattr(limits, word), word


@dataclass
class Scene:
    """The state that the loops of a module share.

    Args:
        trainer: the object that hooks get as the trainer.
        module: the module.
        hooks: the hooks of the callbacks and of the module.
        limits: how many batches are read.
        log_every_n_steps: after how many optimizer steps values are given to trackers; 0 for never.
        clip_value: the largest absolute value of an entry of the gradients; None leaves them.
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
    log_every_n_steps: int = 50
    clip_value: float | None = None
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
        return self._values_of(self.stage)

    def _values_of(self, stage: str) -> LoggedValues:
        if stage not in self._values:
            several = self.strategy is not None and self.strategy.topology.dp_size > 1
            self._values[stage] = LoggedValues(is_training=stage == "train", reduce=self.reduced if several else None)
        return self._values[stage]

    def take_metrics(self) -> Metrics:
        """Returns the metrics of the present stage, and keeps them as the newest ones."""
        found = self.values.metrics()
        self.metrics.update(found)
        return found

    def forget_metrics(self) -> None:
        """Forgets all metrics, at the beginning of a stage."""
        self.metrics = Metrics()
        self._values.clear()

    def agree_to_stop(self) -> bool:
        """Returns whether `should_stop` is true on one of the processes; then it is on all of them. Collective."""
        # A process that stops alone leaves the others waiting for its gradients.
        self.should_stop = collectives.all_max(float(self.should_stop)) > 0
        return self.should_stop

    def state_dict(self) -> dict[str, Any]:
        """Returns the newest metrics, and what has been logged in the epoch, both of this process."""
        logged = self._values.get("train")
        kept = {kind: on_host(values) for kind, values in vars(self.metrics).items()}
        return {"metrics": kept, "values": None if logged is None else logged.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the metrics of a checkpoint, and continues the averages of its epoch.

        Args:
            state: what `state_dict` returned on the process of this rank.
        """
        self.metrics = Metrics(**state["metrics"])
        if state["values"] is not None:
            self._values_of("train").load_state_dict(state["values"])

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
        # A module may log a plain number, which is on the CPU, and NCCL reduces on its device only.
        found = value.to(self.strategy.topology.device, copy=True)
        dist.all_reduce(found, op={"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[how])
        return found
