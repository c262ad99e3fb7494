"""What `configure_optimizers` returns: one optimizer, and the learning rate schedules with their intervals.

The input is one of Lightning's forms; the output is the optimizer and `ModuleSchedules`, which steps each schedule when
Lightning would: after optimizer steps, or at the end of an epoch, or with a metric. Several optimizers are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from forgather.errors import nearest
from forgather.lightning.hooks import unsupported
from forgather.value_text import shown

_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


@dataclass
class ScheduleConfig:
    """A learning rate schedule, and when it is stepped; the names are Lightning's.

    Args:
        scheduler: the schedule.
        interval: "step" or "epoch".
        frequency: it is stepped every so many intervals. With "step", the intervals are batches.
        monitor: the metric that a plateau schedule follows.
        strict: whether it is an error that there is no such metric; else the schedule is not stepped.
        name: the name of the learning rate in logs.
        reduce_on_plateau: whether it is stepped with the metric.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False

    def __post_init__(self) -> None:
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)
        if self.interval not in ("step", "epoch"):
            raise unsupported(
                f"the interval of a learning rate schedule is {shown(self.interval)}", 'use "step" or "epoch"'
            )
        if self.reduce_on_plateau and self.monitor is None:
            raise unsupported(
                "configure_optimizers returns ReduceLROnPlateau without monitor",
                'return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}',
            )
        if not self.reduce_on_plateau and not isinstance(self.scheduler, LRScheduler):
            raise unsupported(
                f"a learning rate schedule is a {type(self.scheduler).__name__}",
                "return a schedule of torch.optim.lr_scheduler",
            )


def read_optimizers(found: Any) -> tuple[Optimizer, list[ScheduleConfig]]:
    """Returns the optimizer and the schedules that `configure_optimizers` returned.

    Args:
        found: an optimizer; a list of one; a tuple of optimizers and schedules; or a mapping with "optimizer".

    Raises:
        TrainingError: FG865 if there are several optimizers or none, or the form is another one.
    """
    schedules: Any = []
    monitor = None
    if isinstance(found, Mapping):
        if extra := sorted(set(found) - {"optimizer", "lr_scheduler", "monitor"}):
            raise unsupported(f"configure_optimizers returns {shown(extra[0])}", nearest(extra[0], ["lr_scheduler"]))
        schedules, monitor = found.get("lr_scheduler") or [], found.get("monitor")
        found = found.get("optimizer")
    elif isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedules = found
    optimizers = list(found) if isinstance(found, list | tuple) else [found]
    if len(optimizers) > 1 and all(isinstance(one, Optimizer | Mapping) for one in optimizers):
        raise unsupported(
            f"configure_optimizers returns {len(optimizers)} optimizers, and the loop steps one",
            "give one optimizer several parameter groups",
        )
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        return read_optimizers(optimizers[0])
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        kind = "nothing" if optimizers in ([], [None]) else f"a {type(optimizers[0]).__name__}"
        raise unsupported(f"configure_optimizers returns {kind}", "return an optimizer of torch")
    several = schedules if isinstance(schedules, list | tuple) else [schedules]
    return optimizers[0], [_config(one, monitor, optimizers[0]) for one in several]


def _config(found: Any, monitor: str | None, optimizer: Optimizer) -> ScheduleConfig:
    given = dict(found) if isinstance(found, Mapping) else {"scheduler": found}
    if extra := [name for name in given if name not in _KEYS]:
        raise unsupported(f"a learning rate schedule has the key {shown(extra[0])}", nearest(extra[0], _KEYS))
    if "scheduler" not in given:
        raise unsupported("a learning rate schedule has no key 'scheduler'", "give the schedule itself")
    # Lightning takes the outer monitor for a schedule without keys of its own only.
    config = ScheduleConfig(**given) if isinstance(found, Mapping) else ScheduleConfig(found, monitor=monitor)
    if config.scheduler.optimizer is not optimizer:
        raise unsupported("a learning rate schedule has another optimizer", "build it with the optimizer returned")
    return config


class ModuleSchedules:
    """The learning rate schedules of a run, in the form that our loop and its checkpoints take.

    Args:
        optimizer: the optimizer.
        configs: the schedules and their intervals; may be empty.
    """

    def __init__(self, optimizer: Optimizer, configs: list[ScheduleConfig]) -> None:
        self.optimizer, self.configs = optimizer, configs

    def step(self) -> None:
        """Does nothing: our loop calls it after each step, and `advance` steps the schedules at their own times."""

    def advance(self, interval: str, number: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Steps the schedules of an interval whose turn it is.

        Args:
            interval: "step" or "epoch".
            number: the number of the batch in its epoch, or of the epoch, counted from 1.
            metrics: the metrics, to step the schedules that follow one; None to step all others.

        Raises:
            TrainingError: FG865 if there is no metric of the name that a schedule follows.
        """
        for config in self.configs:
            if config.reduce_on_plateau != (metrics is not None) or config.interval != interval:
                continue
            if number % config.frequency:
                continue
            if metrics is None:
                config.scheduler.step()
            elif (name := str(config.monitor)) in metrics:
                config.scheduler.step(metrics[name])
            elif config.strict:
                raise unsupported(
                    f"the learning rate follows {config.monitor!r}, which was not logged",
                    nearest(str(config.monitor), sorted(metrics)),
                )

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the schedules, with the names of their classes."""
        return {
            f"schedule_{number}": {"class": type(config.scheduler).__name__, "state": _plain(config.scheduler)}
            for number, config in enumerate(self.configs)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the states of the schedules.

        Raises:
            ValueError: if there are other schedules.
        """
        mine = [type(config.scheduler).__name__ for config in self.configs]
        if mine != (theirs := [part["class"] for part in state.values()]):
            raise ValueError(f"configure_optimizers returns the schedules {mine}, and the checkpoint has {theirs}")
        for config, part in zip(self.configs, state.values(), strict=True):
            config.scheduler.load_state_dict(part["state"])


def _plain(scheduler: Any) -> dict[str, Any]:
    # `LambdaLR` stores functions as None, and newer releases of torch a method, which no file can hold.
    return {name: value for name, value in scheduler.state_dict().items() if not callable(value)}
