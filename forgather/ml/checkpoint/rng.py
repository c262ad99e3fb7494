"""Captures, restores and seeds the random generators of torch (CPU and each CUDA device), Python and NumPy.

`capture_rng` returns the states in a form that `write_state` can store. After `restore_rng(captured)` every generator
returns the numbers that it would have returned right after `capture_rng()`. `seed_process`, `gathered_rng` and
`rank_rng` seed, capture and select states in a run of several processes: data-parallel ranks have different seeds, and
a checkpoint stores the states of all processes.
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
    """Returns the states of all random generators of this process. Synchronizes with the CUDA devices."""
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
    """Sets the random generators of this process to captured states.

    If the number of CUDA devices has changed, a warning is logged and the CUDA generators are not changed.

    Args:
        state: the states that `capture_rng` returned.
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
    """Raises an error if `restore_rng` could not restore the states; the generators do not change.

    Args:
        state: the states in the form that `capture_rng` returns, which were read from a file.

    Raises:
        ValueError: if a number is outside the range that its generator can have.
        Exception: the error of `restore_rng` if the states are malformed in another way.
    """
    _check(state)
    before = capture_rng()
    try:
        # CUDA states are skipped: when the device count differs, the warning belongs to the restore that follows.
        restore_rng({name: value for name, value in state.items() if name != "cuda"})
    finally:
        restore_rng(before)


def _check(state: dict[str, Any]) -> None:
    """Raises an error for a number that no generator state contains. Restoring would truncate such numbers silently."""
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
    """Seeds the random generators of torch (CPU and each CUDA device), Python and NumPy.

    Args:
        seed: the seed, a non-negative integer that torch accepts. NumPy gets the lower 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


_OF_ALL = "of_ranks"


def seed_process(seed: int, topology: Topology, *, step: int = 0) -> None:
    """Seeds all random generators of this process, with different seeds on ranks that compute different tokens.

    Args:
        seed: the seed of the run.
        topology: the topology of this process, from which the data-parallel rank is read.
        step: the step of a checkpoint whose random states cannot be restored, or 0. It changes the seed, so that the
            random numbers from the beginning of the run are not drawn again.
    """
    # Rank 0 keeps the seed as it is: a run of one process draws the numbers that a plain torch script would draw.
    # Ranks that compute other rows, or other positions of the same rows, draw other numbers.
    rank = topology.dp_rank * topology.cp_size + topology.cp_rank
    if rank or step:
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
        # CPU generators read 32 bits of a seed: within a run no two of these ranks get the same ones.
        seed = (int.from_bytes(digest, "big") + rank) % 2**32
    seed_everything(seed)


def gathered_rng() -> dict[str, Any]:
    """Returns the random states of all processes, in the form that a checkpoint stores.

    Collective: every process must call it.
    """
    own = capture_rng()
    return {_OF_ALL: collectives.all_gather(own)} if collectives.is_multi_process() else own


def rank_rng(saved: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """Returns the saved random states of this process; None, with a warning, if the number of processes has changed.

    Args:
        saved: the states that `gathered_rng` returned.
        topology: the topology of this process, from which the rank and the number of processes are read.
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
