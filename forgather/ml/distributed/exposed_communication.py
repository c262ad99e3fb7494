"""Exposed communication: the time of a step in which data is transferred or waited for and nothing is computed.

`ExposedCommunication` records single steps with torch's profiler (kineto), and gives the share of each in which
communication was not hidden behind computation. Other steps cost nothing: no event is recorded, nothing is sent, and
the device is not waited for. `exposed_seconds` computes the time from the events of one step.

On CUDA, communication is the kernels of NCCL and computation all other kernels. On a CPU, communication is the
operations of gloo from the start of the transfer to its end, and computation the operators that the profiler has seen
at the same time, without those that communicate and without what Python does between operators. A transfer includes the
time in which a rank waits for a slower one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from forgather.ml.argument_values import ArgumentValueError
from forgather.ml.log import get_logger

_log = get_logger(__name__)
CODE = "FG719"
_TRANSFERS = ("nccl", "gloo:")
_SENDING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "gloo", "nccl", "autograd", "FSDP")
"""Namespaces of events in which nothing is computed except by the operators that they call."""
_COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
"""Events of compiled code, whose kernels are not recorded on a CPU."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event of a profile.

    Args:
        start, end: when it began and ended.
        thread: the thread that began it; the same number for all events of a device.
        transfers: whether data is transferred, or waited for.
        computes: whether it is computation, as far as no event inside of it is something else.

    Units:
        start, end: nanoseconds.
    """

    start: int
    end: int
    thread: int
    transfers: bool
    computes: bool


class ExposedCommunication:
    """Measures the exposed communication of one step for each log line, or for each n-th one.

    Args:
        every: the number of log lines for one measured step; 0 or false measures none.
        device: the device of this rank.
        several: whether there are several processes. One process does not communicate.

    Raises:
        ArgumentValueError: FG719 if the profiler of torch does not know communication on this type of device.
    """

    def __init__(self, every: int, device: torch.device, *, several: bool) -> None:
        self._every = int(every) if several else 0
        self._device = device
        self._profile: profile | None = None
        self._began = 0.0
        self._share: float | None = None
        # The first step compiles, makes buckets and warms caches: it is never measured.
        self._num_steps = self._num_lines = 0
        self._is_due = self._every > 0
        self._is_warned = False
        if self._every and device.type not in ("cpu", "cuda"):
            raise ArgumentValueError(
                f"communication_share is set, and on {device.type} torch's profiler does not tell it",
                code=CODE,
                hint="remove communication_share; it is measured on CPUs and on CUDA",
            )

    @property
    def is_measured(self) -> bool:
        """Whether any step is measured."""
        return self._every > 0

    def begin_step(self) -> None:
        """Starts the profiler if the step that begins now is to be measured. Waits for the device in this case."""
        self._num_steps += 1
        if not self._is_due or self._num_steps == 1:
            return
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            if not self._is_warned:
                self._is_warned = True
                _log.warning("[%s] another profiler records this step, which leaves out communication_share", CODE)
            return
        self._is_due = False
        is_cuda = self._device.type == "cuda"
        # Kineto prints two lines to stderr each time. It reads the variable at its first start.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile(use_kineto=True, use_cpu=not is_cuda, use_device="cuda" if is_cuda else None)
        self._synchronize()
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """Stops the profiler if it records the step that ends now. Waits for the device in this case."""
        if self._profile is None:
            return
        self._synchronize()
        seconds = time.perf_counter() - self._began
        recorded = self._stop()
        self._share = min(1.0, exposed_seconds(recorded) / max(seconds, 1e-9))

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _stop(self) -> list[Recorded]:
        stopped, self._profile = self._profile, None
        if stopped is None:
            return []
        stopped.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        results = stopped.kineto_results
        return [] if results is None else list(_recorded(results.events(), on_device=self._device.type == "cuda"))

    def close(self) -> None:
        """Stops the profiler if it runs, and forgets what it has recorded: a step has failed, or does not count."""
        if self._profile is not None:
            self._stop()
            self._is_due = True

    def metrics(self) -> dict[str, float]:
        """Returns the share of the step that was measured since the last call, and nothing if none was."""
        if not self._every:
            return {}
        self._num_lines += 1
        if self._num_lines % self._every == 0:
            self._is_due = True
        share, self._share = self._share, None
        return {} if share is None else {"communication_share": share}


def _recorded(events: Iterable[Any], *, on_device: bool) -> Iterator[Recorded]:
    """Yields the events of kineto that tell what a device does: kernels on CUDA, operators on a CPU."""
    for event in events:
        name = event.name()
        is_on_device = event.device_type() != DeviceType.CPU
        if is_on_device != on_device:
            continue
        start = event.start_ns()
        end = start + event.duration_ns()
        transfers = name.startswith(_TRANSFERS)
        if on_device:
            # Annotations of the host are shown on the device as well; copies are neither of both.
            if not event.is_user_annotation():
                yield Recorded(start, end, 0, transfers, not transfers and not name.startswith(("Memcpy", "Memset")))
        elif transfers or not event.is_async():
            yield Recorded(start, end, event.start_thread_id(), transfers, not transfers and _computes(name))


def _computes(name: str) -> bool:
    namespace, separator, _ = name.partition("::")
    return bool(separator) and namespace not in _SENDING or name.startswith(_COMPILED)


def exposed_seconds(recorded: Iterable[Recorded]) -> float:
    """Returns how long data was transferred while nothing was computed.

    An operator that calls others computes between them. So an operator of a sharded tensor, which waits for another
    rank inside, computes only where it does not wait.

    Args:
        recorded: the events of one device, or of all threads of a process.
    """
    events = list(recorded)
    transfers = _union((event.start, event.end) for event in events if event.transfers)
    of_thread: dict[int, list[Recorded]] = {}
    for event in events:
        if not event.transfers:
            of_thread.setdefault(event.thread, []).append(event)
    computing = _union(span for own in of_thread.values() for span in _innermost(own))
    return (_length(transfers) - _overlap(transfers, computing)) / 1e9


def _innermost(events: list[Recorded]) -> Iterator[tuple[int, int]]:
    """Yields the times in which the innermost event of a thread computes."""
    around: list[Recorded] = []
    now = 0
    for event in sorted(events, key=lambda one: (one.start, -one.end)):
        while around and around[-1].end <= event.start:
            ended = around.pop()
            if ended.computes:
                yield now, ended.end
            now = max(now, ended.end)
        if around and around[-1].computes:
            yield now, event.start
        now = event.start
        around.append(event)
    while around:
        ended = around.pop()
        if ended.computes:
            yield now, ended.end
        now = max(now, ended.end)


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the union of spans, as disjoint spans in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def _overlap(ones: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    """Returns the length of the intersection of two lists of disjoint spans in order."""
    total = first = second = 0
    while first < len(ones) and second < len(others):
        start, end = max(ones[first][0], others[second][0]), min(ones[first][1], others[second][1])
        total += max(0, end - start)
        if ones[first][1] <= others[second][1]:
            first += 1
        else:
            second += 1
    return total
