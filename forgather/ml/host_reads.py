"""Whether the host may read a tensor at once, without waiting for a device.

On an accelerator the host queues work and runs ahead; reading a value makes it wait until the device has computed it.
All code of a step asks `host_can_read` before it reads. Tests open `reads_forbidden` to run what an accelerator runs on
a machine that has none. No setting of a user does that: on a CPU it would only be slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_forbidden = False


def host_can_read(device: torch.device) -> bool:
    """Returns whether the host can read a tensor of a device without waiting for it, which is true of a CPU only.

    Args:
        device: the device of the tensor.

    Example:
        >>> host_can_read(torch.device("cpu")), host_can_read(torch.device("cuda"))
        (True, False)
        >>> with reads_forbidden():
        ...     host_can_read(torch.device("cpu"))
        False
    """
    return device.type == "cpu" and not _forbidden


@contextmanager
def reads_forbidden() -> Iterator[None]:
    """Context manager in which the CPU is treated as a device that computes behind the host. For tests only."""
    global _forbidden  # noqa: PLW0603 - not a context variable: the autograd engine and DDP call back in other threads
    before, _forbidden = _forbidden, True
    try:
        yield
    finally:
        _forbidden = before
