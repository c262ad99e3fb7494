"""Everything random, captured and restored: torch (each device), Python and NumPy.

Takes nothing, gives a plain tree that `write_state` can hold. Keeps true: after `restore_rng(captured)`
all four sources give the numbers they would have given after `capture_rng()`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
    if devices is not None and torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([device.cpu() for device in devices])


def seed_everything(seed: int) -> None:
    """Seeds torch (each device), Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
