"""The position of a rank in a layout, as strategies and callbacks read it.

It takes the environment of a process and a layout; it gives a `Topology`. Data-parallel and context-parallel positions
follow from the rank alone.
"""

from __future__ import annotations

from typing import Any

import torch

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.types import Topology


def topology_of(environment: DistributedEnvironment, layout: Layout, device: torch.device, **further: Any) -> Topology:
    """Returns the position of this rank in a layout.

    Args:
        environment: the rank and the world size.
        layout: the sizes of the mesh axes.
        device: the device that this rank computes on.
        **further: the fields of `Topology` that only some strategies set.
    """
    return Topology(
        rank=environment.rank,
        world_size=environment.world_size,
        device=device,
        is_writer=environment.rank == 0,
        local_rank=environment.local_rank,
        dp_rank=layout.position(environment.rank).data,
        dp_size=layout.data_parallel_size,
        cp_rank=layout.position(environment.rank).context,
        cp_size=layout.context_parallel_size,
        **further,
    )
