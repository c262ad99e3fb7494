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
        num_bytes: the peak; 0 until the profile has ended.
    """

    num_bytes = 0


@contextlib.contextmanager
def profiled(name):
    """Gives a `LivePeak`: the peak of what was allocated within this block, since the event `name` began.

    The allocator's own total is read at each event: an event of its own is missing for what a thread of gloo frees,
    because that happens outside of what the profiler follows. The flag lets the allocator count it all the same.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, _FLAG).value = True
    found = LivePeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    events = list(_events(recorded.profiler.kineto_results.experimental_event_tree()))
    (began,) = [event.start_time_ns for event in events if event.name == name]
    totals = {
        event.start_time_ns: event.extra_fields.total_allocated
        for event in events
        if event.typed[0] == _EventType.Allocation
    }
    before = max(time for time in totals if time < began)
    found.num_bytes = max(total for time, total in totals.items() if time >= before)


def _events(nodes):
    for node in nodes:
        yield node
        yield from _events(node.children)
