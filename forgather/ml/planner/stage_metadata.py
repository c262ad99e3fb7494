"""What pipeline stages tell each other about shapes, if the other stages are not there.

Before its first step, each stage of torch's pipelining receives the shapes of its inputs from the stage before it, and
those of its gradients from the one after it. In a trace of one rank nobody sends them. `relayed` keeps what each traced
stage sends, and gives it to the stages that are traced later. The gradient of an output has the shape of the output. If
the stage before was not traced yet, its output is taken to be like that of the nearest earlier stage; `Relay.assumed`
lists what must be compared when all ranks are traced. Messages of tensors keep what they send, as real ones do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import _utils as stage_values
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from forgather.errors import PlanError
from forgather.ml.strategy.pipeline.inference import ForwardPass


@dataclass(slots=True)
class Relay:
    """The messages between stages about shapes.

    Attributes:
        outputs: what each stage that was traced sends forward, by its number.
        assumed: what stages were given in place of what a stage sends that was not traced yet, by its number.
        carried: shape and dtype of each tensor that a stage passed on in the last evaluation.
    """

    outputs: dict[int, Any] = field(default_factory=dict)
    assumed: dict[int, Any] = field(default_factory=dict)
    carried: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)

    def output_of(self, stage: int) -> Any:
        """Returns what a stage sends forward."""
        if stage not in self.outputs:
            earlier = [number for number in self.outputs if number < stage]
            self.assumed[stage] = self.outputs[max(earlier)]
        return self.outputs.get(stage, self.assumed.get(stage))

    @property
    def was_right(self) -> bool:
        """Whether every stage that was traced sent what others had been given in its place."""
        return all(self.outputs.get(stage) == meta for stage, meta in self.assumed.items())


def _refuse(stage: Any, missing: list[str], *_: Any, **__: Any) -> None:
    raise PlanError(
        f"torch {torch.__version__} exchanges shapes between pipeline stages in another way than the planner knows "
        f"(it has no {', '.join(missing)})",
        code="FG969",
        hint="plan with torch 2.13, or plan a strategy without a pipeline",
    )


class _Works(list[Any]):
    """Messages under way. Real ones keep their tensors, simulated ones do not: a schedule may wait at its end only."""

    def __init__(self, works: Iterable[Any], tensors: list[torch.Tensor]) -> None:
        super().__init__(works)
        self.tensors = tensors


@contextlib.contextmanager
def relayed(relay: Relay) -> Iterator[None]:
    """Context manager in which the stages of this process get messages about shapes from a relay.

    Args:
        relay: what earlier traces sent; what this one sends is added.
    """

    def receive(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return relay.output_of(source)
        # A gradient has the shape of the output that it belongs to.
        # Looked up here, because torch before 2.13 has no such names, and plans without pipelines do not need them.
        metas = stage_values._derive_grad_metas(stage._stage_meta.outputs)
        return stage_values._StageBackwardMeta(backward_metas=metas)

    def send(stage: Any, meta: Any, target: int) -> None:
        if target > stage.stage_index:
            relay.outputs[stage.stage_index] = meta

    def vote(stage: Any, *_: Any, **__: Any) -> torch.Tensor:
        # Zero says that shapes have to be inferred, as in a run.
        return torch.zeros(1, dtype=torch.int32)

    def pass_on(run: ForwardPass, tensors: tuple[torch.Tensor, ...], rank: int) -> None:
        relay.carried = [(tensor.shape, tensor.dtype) for tensor in tensors]

    def take_over(run: ForwardPass, rank: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device=run.device) for shape, dtype in relay.carried)

    def start(operations: list[Any], desc: str | None = None) -> list[Any]:
        return _Works(batch_p2p(operations, desc), [operation.tensor for operation in operations])

    batch_p2p = schedules._batch_p2p
    replaced: list[tuple[Any, str, Any]] = [
        (schedules, "_batch_p2p", start),
        (PipelineStage, "_recv_meta", receive),
        (PipelineStage, "_send_meta", send),
        (PipelineStage, "_warmup_forward_vote", vote),
        (PipelineStage, "_warmup_backward_result", vote),
        (ForwardPass, "_send", pass_on),
        (ForwardPass, "_receive", take_over),
    ]
    missing = [name for owner, name, _ in replaced if name not in vars(owner)]
    if missing:
        # A stage that is built asks for what is missing; a run without stages does not.
        replaced = [(PipelineStage, "__init__", functools.partialmethod(_refuse, missing))]
    kept = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    for owner, name, method in replaced:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)
