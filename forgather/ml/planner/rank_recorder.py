"""What one rank allocates and computes in a step, with what gloo and kernels of libraries allocate out of sight.

`RankRecorder` records allocations as `AllocationRecorder` does, counts work, and notes which storages communication
reads and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from forgather.ml.low_bit_optim import plain_parts
from forgather.ml.planner.allocations import Allocation, AllocationRecorder, Region
from forgather.ml.planner.convolutions import BACKWARD, FORWARD, Workspace, workspace_of
from forgather.ml.planner.engine_tensors import is_engine_bucket
from forgather.ml.planner.generation_trace import GENERATION
from forgather.ml.planner.library_kernels import kernel_of
from forgather.ml.planner.operations import WorkCounter
from forgather.ml.planner.operators import DEVICE_OF, name_of, tensors_in
from forgather.ml.planner.places import Places

ACTIVATIONS, LOGITS, TEMPORARIES, BATCH = "activations", "logits", "temporaries", "batch"
OTHER_MODELS = "other models"
GATHERED, COMMUNICATION, BUCKETS = "gathered weights", "communication", "buckets"
CACHE = "cache of keys and values"
PREDICTIONS = "predictions"
WORKSPACES = "workspaces of convolutions"
_GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "c10d._allgather_base_")
_SENDS = ("fsdp.chunk_cat", "c10d._reduce_scatter_base_", "c10d.allreduce_", "_c10d_functional.all_reduce")
_GLOO_COPIES = ("c10d._allgather_base_", "c10d._reduce_scatter_base_")
"""What gloo copies whole while it sends: the result of the first, the input of the second."""


def use_of_message(operation: str) -> str | None:
    """Returns the category of what an operator of communication reads and writes; None for other operators."""
    return GATHERED if operation in _GATHERS else COMMUNICATION if operation in _SENDS else None


def category_of(strategy: Any, places: Places, widths: Sequence[int]) -> Callable[[Allocation], str | None]:
    """Returns the function that names the use of an allocation as far as it is known when it is made.

    Args:
        strategy: the strategy of the run.
        places: where the model is.
        widths: the size of the last dimension of the logits, see `noting_width`.
    """

    def categorize(allocation: Allocation) -> str | None:
        """Returns the category of a new allocation."""
        if allocation.category is not None:
            return allocation.category
        if (use := use_of_message(allocation.operation)) is not None:
            return use
        if is_engine_bucket(strategy, allocation):
            return BUCKETS
        is_output = allocation.region.block == len(places.blocks) and allocation.shape[-1:] == tuple(widths)
        if is_output and allocation.region.phase in ("forward", "backward", "evaluation", GENERATION):
            return LOGITS
        if allocation.region.phase == GENERATION and allocation.operation == "aten.cat" and len(allocation.shape) == 4:
            # A cache grows by a copy of the keys and of the values of a block.
            return CACHE
        if allocation.region.phase in ("forward", "evaluation", GENERATION) or places.recomputes:
            return ACTIVATIONS
        return TEMPORARIES

    return categorize


class RankRecorder(AllocationRecorder):  # type: ignore[no-untyped-call]
    """Context manager that records what a rank allocates and computes while it is active.

    Args:
        locate: a function that returns the current region.
        categorize: a function that returns the category of a new allocation, or None if it is known later.
        work: the counter of operators and messages.
        device_type: the kind of device that is planned for, "cpu" or "cuda".

    Attributes:
        work: the counter of operators and messages.
        convolution_bytes: the bytes of the arguments and results of the largest convolution on a GPU, whose library
            may copy them out of sight; 0 on a CPU.
    """

    def __init__(
        self,
        locate: Callable[[], Region],
        categorize: Callable[[Allocation], str | None],
        work: WorkCounter,
        device_type: str,
    ) -> None:
        super().__init__(locate, categorize)
        self.work = work
        self._device_type = device_type
        self._inside_kernel = False
        self.convolution_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, records the storages of its results, and counts its work."""
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        name = name_of(func)
        if (kernel := kernel_of(name, args, self._device_type)) is not None:
            return self._run_kernel(kernel, args, kwargs or {})
        if self._inside_kernel and func.namespace == "aten" and func._can_decompose():
            # Autograd, which the operator is below of, has divided such an operator everywhere else.
            with self._active_again():
                return func.decompose(*args, **(kwargs or {}))
        if (workspace := self._workspace(name, args)) is not None:
            result = self._with_workspace(workspace, func, types, args, kwargs)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented or not self.counts:
            return result
        self.work.count(func, args, kwargs or {}, result)
        if self._device_type != "cpu" and name in (FORWARD, BACKWARD):
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args, result))
            self.convolution_bytes = max(self.convolution_bytes, size)
        if self._device_type == "cpu" and name in _GLOO_COPIES:
            whole = max(tensors_in(args), key=Tensor.numel)
            copy = super().__torch_dispatch__(torch.ops.aten.clone.default, types, (whole,))
            self.set_new_category([copy], COMMUNICATION)
            del copy
        if (category := use_of_message(name)) is not None:
            self.set_new_category(tensors_in(args, kwargs or {}, result), category)
        return result

    def _workspace(self, name: str, args: Any) -> Workspace | None:
        return workspace_of(name, args) if self._device_type == "cpu" and self.counts else None

    def _with_workspace(self, workspace: Workspace, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator with what it allocates out of sight, in the order of these allocations."""

        def allocated(num_bytes: int) -> list[Tensor]:
            """Returns new memory that is not counted as work."""
            if num_bytes <= 0:
                return []
            sizes = [-(-num_bytes // 4)]
            found = super(RankRecorder, self).__torch_dispatch__(
                torch.ops.aten.empty.memory_format, (), (sizes,), {"dtype": torch.float32, "device": "cpu"}
            )
            self.set_new_category([found], WORKSPACES)
            return [found]

        during, before = allocated(workspace.during), allocated(workspace.before)
        del before
        result = super().__torch_dispatch__(func, types, args, kwargs)
        after = allocated(workspace.after)
        del after, during
        return result

    def _run_kernel(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the function of a library in place of its operator, and records what it allocates."""
        first, self._inside_kernel = len(self.allocations), True
        try:
            with self._active_again():
                result = kernel(*args, **kwargs)
        finally:
            self._inside_kernel = False
        for allocation in self.allocations[first:]:
            if allocation.died is not None:
                allocation.category = TEMPORARIES
        return result

    @contextlib.contextmanager
    def _active_again(self) -> Iterator[None]:
        """Context manager in which this recorder sees operators that are called while it handles one."""
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]


def gradients_of(local: nn.Module) -> Iterator[Tensor]:
    """Yields the gradients of a model.

    Args:
        local: the part of the model on this rank.

    Shapes:
        Yields tensors of any shapes.
    """
    for parameter in local.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def state_of_optimizer(optimizer: Any) -> Iterable[Tensor]:
    """Returns the tensors of an optimizer's state.

    Args:
        optimizer: the optimizer; None if the trainer has none.

    Shapes:
        Returns tensors of any shapes.
    """
    if optimizer is None:
        return ()
    found = [item for state in optimizer.state.values() for item in tree_iter(state) if isinstance(item, Tensor)]
    # A quantized state is a tensor without memory of its own.
    parts = [(item, plain_parts(item)) for item in found]
    return [part for item, own in parts for part in (own if len(own) > 1 else [item])]
