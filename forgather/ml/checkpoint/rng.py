"""Everything random, captured and restored: torch (the CPU and each CUDA device), Python and NumPy.

Takes nothing, gives a plain tree that `write_state` can hold. Keeps true: after `restore_rng(captured)`
all four sources give the numbers they would have given after `capture_rng()`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from forgather.ml.log import get_logger

_log = get_logger(__name__)

_MOST_GAUSS = 40.0


def capture_rng() -> dict[str, Any]:
    """Returns the state of every source of randomness. Waits for the devices."""
    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Sets every source of randomness to a captured state."""
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    devices = state.get("cuda")
    if devices is None:
        return
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(devices) == present:
        torch.cuda.set_rng_state_all([device.cpu() for device in devices])
    else:
        _log.warning(
            "random states of %d CUDA devices were saved, and there are %d: their draws differ from here on",
            len(devices),
            present,
        )


def try_rng(state: dict[str, Any]) -> None:
    """Raises what `restore_rng` would raise on a state that is none; nothing random changes."""
    _check(state)
    before = capture_rng()
    try:
        restore_rng({name: value for name, value in state.items() if name != "cuda"})
    finally:
        restore_rng(before)


def _check(state: dict[str, Any]) -> None:
    """Raises where a number is none that a generator has: what takes them cuts larger ones off without a word."""
    _, internal, gauss = state["python"]
    _, keys, position, has_gauss, cached = state["numpy"]
    whole = {"python": internal, "numpy": [*keys, position], "has_gauss": [has_gauss]}
    for name, values in whole.items():
        if not all(type(value) is int and 0 <= value < (2 if name == "has_gauss" else 2**32) for value in values):
            raise ValueError(f"{name} has a number that no generator has")
    # A draw from the normal distribution that is kept for the next call: of 53 bits, none is larger.
    for value in (gauss, cached):
        if value is not None and not (isinstance(value, int | float) and abs(value) < _MOST_GAUSS):
            raise ValueError(f"a kept draw of the normal distribution is {value!r:.40}")


def seed_everything(seed: int) -> None:
    """Seeds torch (each device), Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
