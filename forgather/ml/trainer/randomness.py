"""The random numbers of each process of a run.

Takes the seed and who a process is; gives states that are captured and restored. Keeps true: the first process draws
what one process alone draws; replicas draw numbers of their own (dropout of two replicas is not the same), and the
processes of one replica the same, so that rows that draw are the same rows there (stages make their own numbers from
them); what was captured is restored on the process that it was captured on.
"""

from __future__ import annotations

import hashlib
from typing import Any

from forgather.ml.checkpoint.rng import capture_rng, seed_everything
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.types import Topology

_log = get_logger(__name__)

_OF_ALL = "of_ranks"


def seed_process(seed: int, topology: Topology, *, step: int = 0) -> None:
    """Seeds everything random of this process.

    Args:
        seed: of the run.
        topology: which replica this is.
        step: where a run goes on whose states cannot be had; numbers of its beginning are not drawn again.
    """
    if topology.dp_rank or step:
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
        # Generators of the CPU look at 32 bits: within a run no two replicas have the same.
        seed = (int.from_bytes(digest, "big") + topology.dp_rank) % 2**32
    seed_everything(seed)


def rng_of_all() -> dict[str, Any]:
    """Returns the random states of this process, or those of all where there are several."""
    own = capture_rng()
    return {_OF_ALL: collectives.gathered(own)} if collectives.several() else own


def own_rng(saved: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """Returns the saved state of this process; None where as many processes as now did not save theirs."""
    states = saved.get(_OF_ALL, [saved])
    if len(states) == topology.world_size:
        found: dict[str, Any] = states[topology.rank]
        return found
    _log.warning(
        "random states of %d processes were saved, and there are %d: what is drawn (dropout) differs from here on",
        len(states),
        topology.world_size,
    )
    return None
