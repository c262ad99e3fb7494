"""Context managers in which Python, NumPy and torch draw random numbers, from a given seed or from where they are.

At the end of the context, the random generators get back the states that they had before it, even after an exception.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_random() -> Iterator[None]:
    """Context manager in which other code may draw numbers; it restores the states of the CPU generators at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def forked_random(seed: int) -> Iterator[None]:
    """Context manager that seeds the CPU generators of Python, NumPy and torch; it restores their states at the end."""
    with kept_random():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # NumPy accepts 32 bits only
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Context manager that seeds all generators, including accelerators; it restores their states at the end."""
    give_back = _accelerator_state()
    try:
        with forked_random(seed):
            torch.manual_seed(seed)
            yield
    finally:
        give_back()


def _accelerator_state() -> Callable[[], None]:
    """Returns a function that restores the current state of the accelerators' generators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return lambda: None
    module: Any = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        # Reading the state would initialize CUDA, after which a process cannot fork. An unused generator still has the
        # state of the last seed.
        return lambda: module.manual_seed_all(torch.initial_seed())
    of_all = hasattr(module, "get_rng_state_all")
    state = module.get_rng_state_all() if of_all else module.get_rng_state()
    return lambda: module.set_rng_state_all(state) if of_all else module.set_rng_state(state)
