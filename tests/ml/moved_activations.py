"""Lets a CPU be a device whose activations are moved to the host, and notes what is moved."""

import contextlib
import mmap

import torch

from forgather.ml.activation_offloading import host_memory


@contextlib.contextmanager
def moved_to_host():
    """Context manager whose value is a list of the number of elements of each storage that was moved.

    torch's allocator, and so its profiler, does not know the memory to which they are moved.
    """
    moved = []

    def allocated(count, dtype):
        moved.append(count)
        return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)

    token = host_memory.set(allocated)
    try:
        yield moved
    finally:
        host_memory.reset(token)
