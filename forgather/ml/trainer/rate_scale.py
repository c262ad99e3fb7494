"""The learning rate schedule of a run, multiplied by a factor that a user may set while the run goes on.

The input is a schedule of any class; after each of its steps, the rates of all parameter groups are those that it would
give alone, times the factor. The schedule itself always reads its own rates, so that the whole rest of it is scaled:
its minimum, its restarts, its reductions on a plateau. Until a factor is set, nothing is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from forgather.ml.trainer.parameter_groups import base_group


class ScaledSchedule:
    """A learning rate schedule with a factor.

    Args:
        schedule: the schedule.
        optimizer: the optimizer whose parameter groups the schedule changes.
    """

    def __init__(self, schedule: Any, optimizer: Any) -> None:
        self.schedule = schedule
        self.factor = 1.0
        self._optimizer = optimizer
        self._unscaled: list[float] | None = None

    @property
    def rate(self) -> float | None:
        """The rate that the schedule alone gives now for the group with the rate of the run; None if it has none."""
        base = base_group(self._optimizer)
        number = next(number for number, group in enumerate(self._groups) if group is base)
        rate = self._unscaled[number] if self._unscaled else base.get("lr")
        return None if rate is None else float(rate)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self, *metric: float) -> None:
        """Makes the next step of the schedule.

        Args:
            *metric: the metric of an evaluation, for a schedule that follows one.
        """
        if self._unscaled is not None:
            self._give(self._unscaled)
        self.schedule.step(*metric)
        if self._unscaled is not None:
            self._unscaled = self._present()
            self._scale()

    def set_factor(self, factor: float) -> None:
        """Multiplies the rates of the schedule by another factor, from now on.

        Args:
            factor: the factor, relative to the schedule alone.
        """
        if self._unscaled is None:
            self._unscaled = self._present()
        self.factor = factor
        self._scale()

    def state_dict(self) -> dict[str, Any]:
        """Returns the factor and the rates of the schedule alone; empty if no factor was set."""
        return {} if self._unscaled is None else {"factor": self.factor, "rates": list(self._unscaled)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the factor, after the optimizer and the schedule have been restored.

        Args:
            state: what `state_dict` returned; empty for a checkpoint without a factor.
        """
        self._unscaled, self.factor = None, 1.0
        if not state:
            return
        rates: Sequence[float] = state["rates"]
        # A function of the step: restoring it has put its own rates, which the length of the run may have changed, into
        # the groups. Under other schedules the groups have the rates of the checkpoint, times the factor; the rates
        # themselves were written by the main process, whose groups another stage of a pipeline may not have.
        if isinstance(self.schedule, LambdaLR):
            rates = self._present()
        elif [rate * state["factor"] for rate in rates] != self._present():
            rates = [rate / state["factor"] for rate in self._present()]
        self._unscaled = list(rates)
        self.factor = state["factor"]
        self._scale()

    def _present(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def _scale(self) -> None:
        assert self._unscaled is not None, "a factor was set"  # noqa: S101
        self._give([rate * self.factor for rate in self._unscaled])

    def _give(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            # A compiled optimizer keeps reading its tensor.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
