"""Communication statistics: how often each operation of each process group is called, with how many bytes and seconds.

`recorded_communication` is a context manager that gives a `CommunicationStats`. While it is open, a kernel in front of
torch's operations (`c10d::allreduce_` and the others) counts each call and passes it on unchanged, whoever makes it:
DDP's reducer in C++, FSDP2, a pipeline or the user's code. Nothing is sent, and no call waits longer than without it.

The bytes of a call are those of the tensors that this rank gives (of a receive: those that it gets). The seconds are
from the call to the completion, with the time in which this rank waits for others. They are measured on the host, for
operations on the CPU whose backend reports the completion; `timed` counts those.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_INPUTS = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "allgather_": 1,
    "_allgather_base_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "gather_": 1,
    "scatter_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "send": 0,
    "recv_": 0,
    "recv_any_source_": 0,
}
"""The operations, and which of their arguments has the tensors that count. The process group comes next."""

_TITLES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "recv_any_source_": "recv",
}


@dataclass(slots=True)
class Traffic:
    """The calls of one operation of one process group.

    Args:
        count: the number of calls.
        num_bytes: the bytes of their tensors on this rank.
        seconds: the time until their completion, of those that are timed.
        timed: the number of calls whose time is known.
    """

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    timed: int = 0


class CommunicationStats:
    """The communication of this process since the recording began, by process group and operation."""

    def __init__(self) -> None:
        self._traffic: dict[tuple[str, str], Traffic] = {}
        # Completions are reported by threads of the backend.
        self._lock = threading.Lock()

    def table(self) -> dict[str, dict[str, Traffic]]:
        """Returns the traffic by process group, then by operation."""
        found: dict[str, dict[str, Traffic]] = {}
        with self._lock:
            for (group, operation), traffic in self._traffic.items():
                found.setdefault(group, {})[operation] = Traffic(
                    traffic.count, traffic.num_bytes, traffic.seconds, traffic.timed
                )
        return found

    @property
    def seconds(self) -> float:
        """The time of all timed calls; calls at the same time count each."""
        with self._lock:
            return sum(traffic.seconds for traffic in self._traffic.values())

    def add(self, group: str, operation: str, num_bytes: int) -> Callable[[], None]:
        """Counts a call, and returns the function to call at its completion."""
        began = time.perf_counter()
        with self._lock:
            traffic = self._traffic.setdefault((group, operation), Traffic())
            traffic.count += 1
            traffic.num_bytes += num_bytes

        def complete() -> None:
            with self._lock:
                traffic.seconds += time.perf_counter() - began
                traffic.timed += 1

        return complete


_KEY = "ADInplaceOrView"
_recorders: list[CommunicationStats] = []
_libraries: list[torch.library.Library] = []


@contextmanager
def recorded_communication() -> Iterator[CommunicationStats]:
    """Context manager that records the communication of this process while it is open, and gives its statistics."""
    stats = CommunicationStats()
    if not _libraries and dist.is_available():
        _register()
    _recorders.append(stats)
    try:
        yield stats
    finally:
        _recorders.remove(stats)
        while _libraries and not _recorders:
            _libraries.pop()._destroy()  # type: ignore[no-untyped-call]


def _register() -> None:
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, position in _INPUTS.items():
        # In front of the kernels that communicate: the dispatcher asks this key first, where these operations have no
        # kernel. The Autograd key would miss the calls that DTensors and compiled code make below autograd.
        library.impl(name, _counting(name, position), _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _counting(name: str, position: int) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    title = _TITLES.get(name, name.strip("_"))
    below: Any = torch._C._after_ADInplaceOrView_keyset

    def kernel(keyset: Any, *args: Any, **named: Any) -> Any:
        tensors = _tensors(args[position])
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        group = _group_name(args[position + 1])
        ends = [stats.add(group, title, num_bytes) for stats in _recorders]
        result = operator.redispatch(keyset & below, *args, **named)
        if all(tensor.device.type == "cpu" for tensor in tensors):
            _at_completion(result, ends)
        return result

    return kernel


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, Sequence) else []


def _group_name(group: Any) -> str:
    found = dist.ProcessGroup.unbox(group)
    return str(found.group_desc or found.group_name)


def _at_completion(result: Any, ends: Sequence[Callable[[], None]]) -> None:
    boxed = result[-1] if isinstance(result, tuple | list) else result
    try:
        future = dist.Work.unbox(boxed).get_future()
    except RuntimeError:  # a backend that does not report the completion of this operation
        return
    for end in ends:
        future.add_done_callback(functools.partial(_ignoring_result, end))


def _ignoring_result(end: Callable[[], None], future: Any) -> None:
    end()
