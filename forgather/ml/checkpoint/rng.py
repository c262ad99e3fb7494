"""Random generator states: captured, restored, and seeded for torch (CPU and each CUDA device), Python and NumPy.

`capture_rng` returns a plain tree that `write_state` can store. After `restore_rng(captured)` every generator returns
the numbers that it would have returned right after `capture_rng()`. `seed_process`, `gathered_rng` and `rank_rng` do
the same for all ranks of a run: data-parallel ranks have different seeds, and a checkpoint holds the states of each.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.types import Topology

_log = get_logger(__name__)

_MOST_GAUSS = 40.0


def capture_rng() -> dict[str, Any]:
    """Returns the state of every random generator of this process. Synchronizes the CUDA devices."""
    legacy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [str(kind), keys.tolist(), int(position), int(has_gauss), float(cached)],
    }
    # Asking an uninitialized CUDA for its state would initialize it, which takes memory on every visible device.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Sets every random generator to a captured state.

    A warning is logged, and the CUDA generators are left alone, when the number of CUDA devices has changed.

    Args:
        state: the tree that `capture_rng` returned.
    """
    torch.set_rng_state(state["torch"].cpu())
    # A state that was read from JSON has lists in place of the tuple that `setstate` requires.
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
            "random states of %d CUDA devices were saved, and there are %d: their random numbers differ from here on",
            len(devices),
            present,
        )


def check_rng(state: dict[str, Any]) -> None:
    """Raises what `restore_rng` would raise for a malformed state; the generators keep their states.

    Args:
        state: a tree as `capture_rng` returns it, read from a file.

    Raises:
        ValueError: a number is outside the range of its generator.
    """
    _check(state)
    before = capture_rng()
    try:
        # CUDA states are skipped: when the device count differs, the warning belongs to the restore that follows.
        restore_rng({name: value for name, value in state.items() if name != "cuda"})
    finally:
        restore_rng(before)


def _check(state: dict[str, Any]) -> None:
    """Raises for a number that no generator can have: `setstate` and `np.uint32` truncate larger ones silently."""
    _, internal, gauss = state["python"]
    _, keys, position, has_gauss, cached = state["numpy"]
    whole = {"python": internal, "numpy": [*keys, position], "has_gauss": [has_gauss]}
    for name, values in whole.items():
        if not all(type(value) is int and 0 <= value < (2 if name == "has_gauss" else 2**32) for value in values):
            raise ValueError(f"{name} has a number that no generator state has")
    # `random.gauss` and NumPy keep the second draw of a pair. A draw is made from 53 random bits, so its size is
    # bounded.
    for value in (gauss, cached):
        if value is not None and not (isinstance(value, int | float) and abs(value) < _MOST_GAUSS):
            raise ValueError(f"the stored draw of the normal distribution is {value!r:.40}")


def seed_everything(seed: int) -> None:
    """Seeds torch (CPU and each CUDA device), Python and NumPy.

    Args:
        seed: any non-negative integer that torch accepts; NumPy gets its lower 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


_OF_ALL = "of_ranks"


def seed_process(seed: int, topology: Topology, *, step: int = 0) -> None:
    """Seeds all generators of this process: torch, Python, NumPy, and the accelerators.

    Args:
        seed: of the run.
        topology: gives the data-parallel rank.
        step: of a checkpoint whose random states cannot be restored; numbers of the run's beginning are not drawn
            again.
    """
    # Rank 0 keeps the seed as it is: a run of one process draws the numbers that a plain torch script would draw.
    if topology.dp_rank or step:
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
        # CPU generators read 32 bits of a seed: within a run no two data-parallel ranks get the same ones.
        seed = (int.from_bytes(digest, "big") + topology.dp_rank) % 2**32
    seed_everything(seed)


def gathered_rng() -> dict[str, Any]:
    """Returns the random states of this process; with several processes, those of all. Collective."""
    own = capture_rng()
    return {_OF_ALL: collectives.all_gather(own)} if collectives.is_multi_process() else own


def rank_rng(saved: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """Returns the saved random states of this process; None, with a warning, if the number of processes changed.

    Args:
        saved: given by `gathered_rng`.
        topology: gives rank and number of processes.
    """
    states = saved.get(_OF_ALL, [saved])
    if len(states) == topology.world_size:
        found: dict[str, Any] = states[topology.rank]
        return found
    _log.warning(
        "random states of %s were saved, and there are %d: random numbers (dropout) differ from here on",
        plural(len(states), "process", "processes"),
        topology.world_size,
    )
    return None
