"""The passes of pipeline stages within a recording: when each began, what it gave to other stages, and its work.

`noting_passes` is active around a trace of a rank of a pipeline. It notes the calls of torch's own stages while an
`AllocationRecorder` records, so that the allocations of the trace can be assigned to passes by their times.

Units:
    Times are those of the recorder, in events.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.stage import PipelineStage
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from forgather.ml.planner.rank_recorder import RankRecorder
from forgather.ml.strategy.pipeline.stage import blocks_of_stage
from forgather.planner.work import Message, Operation


@dataclass(frozen=True, kw_only=True)
class StagePass:
    """One pass of a stage over one micro-batch.

    Args:
        stage: the number of the stage.
        kind: F for forward, B for backward, I for the gradients of inputs alone, W for those of weights alone.
        micro_batch: the number of the micro-batch.
        begins: the time before it.
        entered: the time when a forward pass entered the first block; of other passes, when they began.
        computed: the time when the stage returned. The loss and the messages come after it.
        passed_on: the births of the storages that the stage passed on: its outputs, or the gradients of its inputs.
        operations: the number of equal operators in the recording until it began.
        messages: the number of equal messages until then.
    """

    stage: int
    kind: str
    micro_batch: int
    begins: int
    entered: int
    computed: int
    passed_on: frozenset[int]
    operations: Mapping[Operation, float]
    messages: Mapping[Message, float]


@contextlib.contextmanager
def noting_passes() -> Iterator[list[StagePass]]:
    """Context manager that gives a list, to which each recorded pass is added when it ends."""
    found: list[StagePass] = []
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    # The class inherits these methods, so that deleting the new ones brings them back.
    for name in names:
        setattr(PipelineStage, name, _noting(getattr(PipelineStage, name), name, found))
    try:
        yield found
    finally:
        for name in names:
            delattr(PipelineStage, name)


def _noting(method: Callable[..., Any], name: str, found: list[StagePass]) -> Callable[..., Any]:
    def noted(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()
        recorder = next((mode for mode in modes if isinstance(mode, RankRecorder)), None)
        if recorder is None:
            # The first step of a trace only makes the optimizer's state.
            return method(stage, micro_batch, *args, **kwargs)
        begins, work = recorder.clock, recorder.work
        operations, messages = dict(work.operations), dict(work.messages)
        entries: list[int] = []
        first = next(iter(blocks_of_stage(stage.submod).values()), stage.submod)
        hook = first.register_forward_pre_hook(lambda *_: entries.append(recorder.clock))
        try:
            result = method(stage, micro_batch, *args, **kwargs)
        finally:
            hook.remove()
        kind = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(name) or (
            "B" if kwargs.get("full_backward", True) else "I"
        )
        given = result if kind == "F" else stage.bwd_cache.get(micro_batch) if kind in "BI" else ()
        tensors = [item for item in tree_iter(given) if isinstance(item, Tensor)]
        found.append(
            StagePass(
                stage=stage.stage_index,
                kind=kind,
                micro_batch=micro_batch,
                begins=begins,
                entered=entries[0] if kind == "F" else begins,
                computed=recorder.clock,
                passed_on=frozenset(one.born for one in recorder.found(tensors)),
                operations=operations,
                messages=messages,
            )
        )
        return result

    return noted
