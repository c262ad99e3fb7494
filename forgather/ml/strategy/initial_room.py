"""Whether this machine has room for a model that one process makes completely, before each rank takes its slices.

`lack_of_room` takes the size of the model. It returns a recommendation to compute the weights by position if the memory
or the temporary folder of this machine is too small.
"""

from __future__ import annotations

import shutil
import tempfile

from forgather.available_memory import available_bytes
from forgather.ml.number_format import format_bytes

_COUNTER = "set initial_weights: counter, by which each process computes its slices of the weights and writes no file"


def lack_of_room(needed: int) -> str | None:
    """Returns what is too small on this machine for a model that one process makes, and what to set; None if it fits.

    Args:
        needed: the size of the whole model, in bytes.
    """
    memory, place = available_bytes(), tempfile.gettempdir()
    size = format_bytes(needed)
    if memory is not None and needed > memory:
        return f"one process makes the whole model of {size}, and {format_bytes(memory)} of memory are free: {_COUNTER}"
    free = shutil.disk_usage(place).free
    if needed > free:
        return f"the whole model of {size} is written to {place}, where {format_bytes(free)} are free: {_COUNTER}"
    return None
