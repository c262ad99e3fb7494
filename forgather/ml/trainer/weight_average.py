"""The exponential moving average of the trained weights (EMA).

Takes a strategy; keeps a copy of each trained parameter on this rank, in float32 at least, and moves it towards the
weights after an optimizer step. The arithmetic is elementwise, so shards and stages have the bits of one process. The
copies are stored in the optimizer's part of a checkpoint, by parameter name, so a checkpoint has both weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.state import AVERAGE, like_parameter

_log = get_logger(__name__)


class WeightAverage:
    """The average of the trained weights of a strategy.

    Args:
        strategy: the strategy, whose optimizer is built.
        decay: the share of the average that stays at each update.
        after_step: the number of steps after which the average starts. The first update copies the weights.
        every: the number of steps between two updates.

    Source:
        `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`, without its copy of the model. Buffers are
        those of the model.
    """

    def __init__(self, strategy: Strategy, *, decay: float, after_step: int = 0, every: int = 1) -> None:
        self.decay = decay
        self.updates = 0
        self._after_step, self._every = after_step, every
        self._strategy = strategy
        self._parameters = strategy.trained_parameters()
        with torch.no_grad():
            self._average = {name: _wide_copy(_local(one)) for name, one in self._parameters.items()}
        self._set_aside: dict[str, Tensor] = {}
        self._move = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> list[Tensor]:
        """The copies on this rank."""
        return list(self._average.values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the weights, if that is due.

        Args:
            step: the number of steps that are done, of which the last one has changed the weights.
        """
        if step <= self._after_step or step % self._every:
            return
        weights = [_local(one).to(self._average[name].dtype) for name, one in self._parameters.items()]
        if self.updates:
            self._move(self.tensors, weights, 0)
        else:
            self._copy_weights()
        self.updates += 1

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for name, parameter in self._parameters.items():
            self._average[name].copy_(_local(parameter))

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights. Collective: every rank must enter it.

        The weights are back afterwards, to the bits.
        """
        if not self.updates:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Sharded weights that are still gathered would be used instead of the new ones.
        self._strategy.trained_parameters()
        for name, parameter in self._parameters.items():
            weight, average = _local(parameter), self._average[name]
            if name in self._set_aside:
                weight.copy_(self._set_aside.pop(name))
            elif weight.dtype != average.dtype:
                self._set_aside[name] = weight.clone()
                weight.copy_(average)
            else:
                held = weight.clone()
                weight.copy_(average)
                average.copy_(held)

    @torch.no_grad()
    def replace_weights(self) -> None:
        """Gives the model the averaged weights for good. Collective: every rank must call it."""
        if not self.updates:
            _log.warning("ema_decay: no step has updated the average, and the model keeps its weights")
            return
        self._strategy.trained_parameters()
        for name, parameter in self._parameters.items():
            _local(parameter).copy_(self._average[name])
        self._strategy.trained_parameters()
        _log.warning(
            "the model has the averaged weights (ema_decay %g, %d updates); checkpoints hold both",
            self.decay,
            self.updates,
        )

    def added_to(self, captured: LocalState) -> LocalState:
        """Returns the state of a rank, with the average of each parameter in the optimizer state of the parameter.

        Args:
            captured: the state, with that of the optimizer.
        """
        if not self.updates:  # until then the average is what the weights are
            self._copy_weights()
        assert captured.optimizer is not None, "a run has an optimizer"  # noqa: S101
        state = dict(captured.optimizer["state"])
        for name, parameter in self._parameters.items():
            state[name] = {**state.get(name, {}), AVERAGE: _as_shard(self._average[name], parameter)}
        return replace(captured, optimizer={**captured.optimizer, "state": state})

    def state_dict(self) -> dict[str, int]:
        """Returns the number of updates."""
        return {"updates": self.updates}

    def restore(self, saved: CheckpointReader, state: Mapping[str, Any]) -> None:
        """Restores the average of a checkpoint; this rank reads its own part. Collective: every rank must call it.

        Args:
            saved: the reader of the checkpoint, whose optimizer state was restored.
            state: what `state_dict` returned.
        """
        stored = {} if saved.optimizer is None else saved.optimizer["state"]
        self.updates = int(state.get("updates", 1))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if AVERAGE not in stored.get(name, {}):
                    self.updates = 0
                    _log.warning("the checkpoint has no averaged weights: the average starts at the next update")
                    return
                value = stored[name][AVERAGE]
                there = like_parameter(value, parameter)
                saved.read(value, there)
                self._average[name].copy_(_local(there))


def average_of(strategy: Strategy, args: Any) -> WeightAverage | None:
    """Returns the average that the training arguments ask for, or None.

    Args:
        strategy: the strategy, whose optimizer is built.
        args: the training arguments.
    """
    # Arguments of transformers' own trainer have no such setting.
    if getattr(args, "ema_decay", None) is None:
        return None
    return WeightAverage(strategy, decay=args.ema_decay, after_step=args.ema_update_after_step, every=args.ema_every)


def with_average(average: WeightAverage | None, captured: LocalState) -> LocalState:
    """Returns the state of a rank, with the averaged weights if there are any; see `WeightAverage.added_to`.

    Args:
        average: the average; None if there is none.
        captured: the state.
    """
    return captured if average is None else average.added_to(captured)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _wide_copy(local: Tensor) -> Tensor:
    return local.to(torch.promote_types(local.dtype, torch.float32), copy=True)


def _as_shard(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
