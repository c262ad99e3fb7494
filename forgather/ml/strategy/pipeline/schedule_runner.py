"""Runs a schedule of torch over the stages of this rank, forward and backward, with random numbers of its own.

Takes the stage modules of this rank and inputs; gives gradients, and the losses on the rank of the last stage. Keeps
true: gradients add up over steps and are never scaled by the schedule; each shape of inputs has its own buffers, since
torch freezes shapes at the first step; gradients of earlier steps survive new buffers. Stages and replicas draw
different random numbers; the global ones stay equal on all ranks of a replica, since a collator may draw from them,
and restoring them restores the numbers of every stage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from forgather.ml.strategy.pipeline.microbatch_split import StepInputs
from forgather.ml.strategy.pipeline.schedules import Placement, facts_of

_MAX_SHAPES = 16
"""Shapes whose buffers are kept; the least recently used ones are dropped."""

MicroBatchLoss = Callable[[Any, int], Tensor]


class ScheduleRunner:
    """Forward and backward passes over the stages.

    Args:
        stages: the stage modules of this rank by number.
        schedule: name of the schedule.
        placement: where all stages lie.
        parts: number of micro-batches.
        group: the process group of the pipeline.
        device: where this rank computes.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: str,
        placement: Placement,
        parts: int,
        group: Any,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.placement = placement
        self.parts = parts
        self.group = group
        self.device = device
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._loss: MicroBatchLoss | None = None
        self._sharded = any(isinstance(stage, FSDPModule) for stage in stages.values())
        # What splits the backward pass runs parts of a compiled graph twice, from buffers that must not be given away.
        if facts_of(schedule).splits_backward:
            torch._functorch.config.donated_buffer = False

    def run(self, inputs: StepInputs, loss: MicroBatchLoss) -> Tensor | None:
        """Adds the gradients of one step; returns the sum of its losses where the last stage lies.

        Args:
            inputs: what the stages get; rows split evenly.
            loss: called with the output of the last stage and the number of the micro-batch.
        """
        self._loss = loss
        made, is_new = self._schedule_for(inputs)
        earlier = self._take_gradients() if is_new and self._sharded else {}
        first = inputs.first if 0 in self.stages else ()
        has_loss = self.placement.num_stages - 1 in self.stages
        losses: list[Tensor] = []
        # The target of a micro-batch is its number: the loss needs more than one tensor of it.
        target = torch.arange(self.parts) if has_loss else None
        try:
            made.step(*first, target=target, losses=losses, return_outputs=False, **inputs.every)
        except RuntimeError as error:
            raise _cause(error) from None
        finally:
            self._loss = None
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return torch.stack([part.detach() for part in losses]).sum() if has_loss else None

    def _schedule_for(self, inputs: StepInputs) -> tuple[Any, bool]:
        key = inputs.shape
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], False
        while len(self._kept) >= _MAX_SHAPES:
            self._kept.popitem(last=False)
        made = self._kept[key] = self._make_schedule()
        return made, True

    def _make_schedule(self) -> Any:
        stages = [
            _Stage(module, index, self.placement.num_stages, self.device, group=self.group)
            for index, module in sorted(self.stages.items())
        ]
        held = stages[0] if facts_of(self.schedule).one_stage else stages
        kind = get_schedule_class(self.schedule.removeprefix("Schedule"))
        return kind(held, self.parts, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, output: Any, number: Tensor) -> Tensor:
        assert self._loss is not None, "losses are computed within a step"  # noqa: S101
        return self._loss(output, int(number))

    def _take_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Takes the gradients away; torch drops those of sharded parameters when it makes buffers."""
        found = {}
        for stage in self.stages.values():
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    found[parameter] = parameter.grad
                    parameter.grad = None
        return found


class _Stage(PipelineStage):
    """A stage whose shapes are found out with zeros: torch takes memory as it lies, in which anything may stand."""

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        if not self.is_first:
            with torch.no_grad():
                for tensor in args:
                    tensor.zero_()
        return super()._compute_outputs(*args, module=module, **kwargs)


def _cause(error: BaseException) -> BaseException:
    """Returns what a stage raised: torch wraps it in a RuntimeError that shows tensors, once a stage."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class StageRNG:
    """The random numbers of the passes on one rank.

    Args:
        replica: which replica this is.
        position: position of this rank in the pipeline.
        draws: whether the model draws at all; where it does not, nothing is touched.
    """

    def __init__(self, *, replica: int, position: int, draws: bool) -> None:
        self.replica = replica
        self.position = position
        self.draws = draws

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Runs its body with random numbers of this rank; every rank of the pipeline enters as often as the others."""
        if not self.draws:
            yield
            return
        # One draw from the numbers that all ranks of the replica share: what a checkpoint holds is enough to go on.
        shared = int(torch.randint(2**62, (), dtype=torch.int64))
        kept = torch.get_rng_state()
        text = f"{shared} {self.replica} {self.position}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        try:
            yield
        finally:
            torch.set_rng_state(kept)


def draws_random_numbers(model: nn.Module, config: Any = None) -> bool:
    """Tells whether a model in training draws: a dropout of more than zero, as a module or in its configuration."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            return True
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    words = ("drop", "noise", "jitter")
    return any(
        isinstance(value, float) and value > 0 and any(word in name for word in words)
        for name, value in settings.items()
    )
