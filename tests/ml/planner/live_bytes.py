"""The peak of the bytes that torch's CPU allocator has given out and not got back, as `torch.profiler` sees it."""

import contextlib
import ctypes
from pathlib import Path

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


class LivePeak:
    """What a profile found.

    Args:
        num_bytes: the smallest of the peaks of several equal steps; 0 until the profile has ended.
    """

    num_bytes = 0


@contextlib.contextmanager
def profiled(steps):
    """Gives a `LivePeak`: the peak of what was allocated within this block, in the step that needed least.

    The allocator's own total is read at each event: an event of its own is missing for what a thread of gloo frees,
    because that happens outside of what the profiler follows. The flag lets the allocator count it all the same. Such
    a thread may also free a message late, by chance; therefore several steps are measured.

    Args:
        steps: the names of the events that are the steps, in their order.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, _FLAG).value = True
    found = LivePeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    events = list(_events(recorded.profiler.kineto_results.experimental_event_tree()))
    totals = [
        (event.start_time_ns, event.extra_fields.total_allocated)
        for event in events
        if event.typed[0] == _EventType.Allocation
    ]
    began = {event.name: event.start_time_ns for event in events if event.name in steps}
    ends = [*(began[name] for name in steps[1:]), max(time for time, _ in totals) + 1]
    peaks = []
    for name, end in zip(steps, ends, strict=True):
        before = max(time for time, _ in totals if time < began[name])
        peaks.append(max(total for time, total in totals if before <= time < end))
    found.num_bytes = min(peaks)


def _events(nodes):
    for node in nodes:
        yield node
        yield from _events(node.children)
