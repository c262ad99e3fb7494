"""The tensors that DeepSpeed's engine keeps besides those of the model: partitions, gradients and buckets.

`hold_engine` notes them in a recording of allocations, before the step that is recorded.

Source:
    The attributes of `DeepSpeedZeroOptimizer` and `DeepSpeedZeroOptimizer_Stage3` in deepspeed 0.19.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from forgather.ml.planner.allocations import Allocation, AllocationRecorder
from forgather.ml.planner.value_readings import living_tensors
from forgather.ml.strategy.deepspeed import DeepSpeedZero

_FP32_PARTITIONS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups"}
_DIVIDED = 3  # the stage at which weights are divided, too
_FP32_PARTITIONS_STAGE_3 = "fp32_partitioned_groups_flat"


@contextlib.contextmanager
def separate_engine() -> Iterator[None]:
    """Context manager in which DeepSpeed accepts fake tensors, and after which it forgets its process groups.

    It keeps them in global variables until the Python process ends, and each trace has groups of its own.
    """
    try:
        with warnings.catch_warnings():
            # It asserts that slices are aligned.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        # Only if the run is one of DeepSpeed, whose import takes seconds.
        if "deepspeed" in sys.modules:
            sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
            groups = sys.modules["deepspeed.utils.groups"]
            for name in [name for name in vars(groups) if name.endswith("_GROUP")]:
                setattr(groups, name, {} if isinstance(getattr(groups, name), dict) else None)


def hold_engine(
    recorder: AllocationRecorder, strategy: Any, fake: FakeTensorMode, *, buckets: str, optimizer: str, parameters: str
) -> None:
    """Records all tensors of an engine that are alive, with their categories. Other strategies have none.

    Args:
        recorder: the recorder.
        strategy: the strategy of the run.
        fake: the mode that made the tensors.
        buckets: the category of what is neither of the others.
        optimizer: the category of the float32 weights that the optimizer steps, and of its state.
        parameters: the category of the weights with which the model computes.
    """
    if not isinstance(strategy, DeepSpeedZero):
        return
    recorder.hold(living_tensors(fake), buckets)
    recorder.hold(_fp32_partitions(strategy), optimizer)
    partitions = (getattr(weight, "ds_tensor", None) for weight in strategy.model.parameters())
    recorder.hold((item for item in partitions if item is not None), parameters)


class EngineHost(NamedTuple):
    """The tensors that an engine keeps in the memory of the host if it offloads them. It names no device in a trace.

    Args:
        weights: the parts of the weights with which the model computes.
        gradients: what it keeps of gradients.
        state: the float32 weights, and copies of them on their way to the model. The optimizer's state is not here.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    state: Sequence[Tensor]


def engine_host(strategy: DeepSpeedZero) -> EngineHost:
    """Returns the tensors of an engine that may be offloaded."""
    zero = strategy._engine.optimizer
    partitions = _fp32_partitions(strategy)

    def kept(*names: str) -> list[Tensor]:
        found = tree_iter([getattr(zero, name, None) for name in names])
        return [item for item in found if isinstance(item, Tensor)]

    return EngineHost(
        weights=[one.ds_tensor for one in strategy.model.parameters() if hasattr(one, "ds_tensor")],
        gradients=[
            *(one.grad for one in partitions if one.grad is not None),
            *kept("accumulated_grads_in_cpu", "grad_partitions_flat_buffer", "temp_grad_buffer_for_cpu_offload"),
        ],
        state=[*partitions, *kept("param_buffer_of_bit16_for_cpu_offload_groups")],
    )


class EngineSizes(NamedTuple):
    """The bytes of the part of a model that a rank has, as an engine copies it between host and device.

    Args:
        gradients: its gradients, in float32.
        updated: its trained weights, in the dtype in which the model computes.
        gathered: its weights that are gathered for each pass, in the same dtype.
    """

    gradients: int
    updated: int
    gathered: int


def engine_sizes(strategy: DeepSpeedZero) -> EngineSizes:
    """Returns what an engine copies between host and device."""
    elements = sum(one.numel() for one in _fp32_partitions(strategy))
    weights: list[Any] = list(strategy.model.parameters())
    size = next((one.element_size() for one in weights if one.requires_grad), 4)
    divided = [one.ds_tensor for one in weights if not getattr(one, "ds_persist", True)]
    return EngineSizes(4 * elements, size * elements, sum(one.numel() * one.element_size() for one in divided))


def _fp32_partitions(strategy: DeepSpeedZero) -> list[Tensor]:
    return list(
        getattr(strategy._engine.optimizer, _FP32_PARTITIONS.get(strategy.config.stage, _FP32_PARTITIONS_STAGE_3))
    )


def passes_to_settle(strategy: Any) -> int:
    """Returns after how many micro-batches all others are alike: ZeRO 3 learns the order of the modules from the first
    one, and compares it with other ranks at the beginning of the second.

    Args:
        strategy: the strategy of the run.
    """
    return 2 if isinstance(strategy, DeepSpeedZero) and strategy.config.stage == _DIVIDED else 1


def engine_gradients(strategy: Any) -> Iterator[Tensor]:
    """Yields the partitions of gradients that an engine keeps between the backward pass and the step.

    Shapes:
        Yields tensors of any shapes.
    """
    if isinstance(strategy, DeepSpeedZero):
        kept = getattr(strategy._engine.optimizer, "averaged_gradients", {})
        yield from (item for item in tree_iter(list(kept.values())) if isinstance(item, Tensor))


def is_engine_bucket(strategy: Any, allocation: Allocation) -> bool:
    """Returns whether an allocation has the size of one of the engine's buckets.

    Args:
        strategy: the strategy of the run.
        allocation: the allocation.
    """
    if not isinstance(strategy, DeepSpeedZero) or strategy._engine is None:
        return False
    size: int = strategy._engine.optimizer.reduce_bucket_size
    return allocation.num_bytes == size * allocation.dtype.itemsize
