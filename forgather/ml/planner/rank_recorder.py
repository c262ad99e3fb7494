"""What one rank allocates and computes in a step, with what gloo and kernels of libraries allocate out of sight.

`RankRecorder` records allocations as `AllocationRecorder` does, counts work, and notes which storages communication
reads and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from forgather.ml.planner.allocations import Allocation, AllocationRecorder, Region
from forgather.ml.planner.library_kernels import kernel_of
from forgather.ml.planner.operations import WorkCounter

GATHERED, COMMUNICATION, TEMPORARIES = "gathered weights", "communication", "temporaries"
_GATHERS = ("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "c10d._allgather_base_")
_SENDS = ("fsdp.chunk_cat", "c10d._reduce_scatter_base_", "c10d.allreduce_", "_c10d_functional.all_reduce")
_GLOO_COPIES = ("c10d._allgather_base_", "c10d._reduce_scatter_base_")
"""What gloo copies whole while it sends: the result of the first, the input of the second."""


def use_of_message(operation: str) -> str | None:
    """Returns the category of what an operator of communication reads and writes; None for other operators."""
    return GATHERED if operation in _GATHERS else COMMUNICATION if operation in _SENDS else None


class RankRecorder(AllocationRecorder):  # type: ignore[no-untyped-call]
    """Context manager that records what a rank allocates and computes while it is active.

    Args:
        locate: a function that returns the current region.
        categorize: a function that returns the category of a new allocation, or None if it is known later.
        work: the counter of operators and messages.
        device_type: the kind of device that is planned for, "cpu" or "cuda".
    """

    def __init__(
        self,
        locate: Callable[[], Region],
        categorize: Callable[[Allocation], str | None],
        work: WorkCounter,
        device_type: str,
    ) -> None:
        super().__init__(locate, categorize)
        self._work = work
        self._device_type = device_type
        self._inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, records the storages of its results, and counts its work."""
        name = str(getattr(func, "overloadpacket", func))
        if (kernel := kernel_of(name, args, self._device_type)) is not None:
            return self._run_kernel(kernel, args, kwargs or {})
        if self._inside_kernel and func.namespace == "aten" and func._can_decompose():
            # Autograd, which the operator is below of, has divided such an operator everywhere else.
            with self._active_again():
                return func.decompose(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented or not self.counts:
            return result
        self._work.count(func, args, kwargs or {}, result)
        if self._device_type == "cpu" and name in _GLOO_COPIES:
            whole = max((item for item in tree_iter(args) if isinstance(item, Tensor)), key=Tensor.numel)
            copy = super().__torch_dispatch__(torch.ops.aten.clone.default, types, (whole,))
            self.set_new_category([copy], COMMUNICATION)
            del copy
        if (category := use_of_message(name)) is not None:
            self.set_new_category(tree_iter((args, kwargs or {}, result)), category)
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
