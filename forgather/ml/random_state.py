"""Random numbers of a block of code that the caller's do not meet.

Takes a seed; gives a context in which Python, NumPy and torch draw from it. Keeps true: after the block every
generator goes on as if nothing had been drawn, also where the block fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def forked_random(seed: int) -> Iterator[None]:
    """Runs its body with Python, NumPy and torch's CPU generator seeded, and gives the caller's states back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Runs its body with every generator seeded, those of accelerators too, and gives the caller's states back."""
    give_back = _accelerator_state()
    try:
        with forked_random(seed):
            torch.manual_seed(seed)
            yield
    finally:
        give_back()


def _accelerator_state() -> Callable[[], None]:
    """Returns what gives the generators of the accelerators back the state that they have now."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return lambda: None
    module: Any = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        # Its states cannot be read before it is in use, and a process that forks later must not begin to use it.
        # It begins with what the caller's own seed, or none, has left for it.
        return lambda: module.manual_seed_all(torch.initial_seed())
    of_all = hasattr(module, "get_rng_state_all")
    state = module.get_rng_state_all() if of_all else module.get_rng_state()
    return lambda: module.set_rng_state_all(state) if of_all else module.set_rng_state(state)
