"""The device mesh of a layout: one grid of ranks, and the groups along its axes.

Takes a `Layout` and a started process group; gives a `Mesh`. Keeps true: every axis has a group, also one of size
one, so that code over an axis needs no second path; every rank makes the same groups in the same order; each group
waits as long as that of all processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forgather.ml.distributed.group import wait_as_long
from forgather.ml.distributed.layout import Layout, Position


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks.

    Args:
        layout: the sizes.
        position: where this rank stands.
        whole: torch's mesh with the axes "pp", "dp_replicate", "dp_shard", "tp".
        dp: the data-parallel axis, replicas and shards as one.
    """

    layout: Layout
    position: Position
    whole: DeviceMesh
    dp: DeviceMesh

    @classmethod
    def of(cls, layout: Layout, device_type: str) -> Mesh:
        """Makes the groups; every rank must call this."""
        replicate = layout.data_parallel_size // layout.shard_size
        sizes = (layout.pipeline_parallel_size, replicate, layout.shard_size, layout.tensor_parallel_size)
        whole = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        for group in whole.get_all_groups():
            wait_as_long(group)
        dp = _joined(whole, "dp_replicate", "dp_shard", name="dp")
        return cls(layout, layout.position(dist.get_rank()), whole, dp)

    @property
    def pp(self) -> DeviceMesh:
        """The axis of pipeline stages."""
        return self.whole["pp"]

    @property
    def tp(self) -> DeviceMesh:
        """The axis of slices of a layer."""
        return self.whole["tp"]

    @property
    def shards(self) -> DeviceMesh:
        """What `fully_shard` takes: the shards, and the replicas before them where there are any."""
        if self.layout.shard_size == self.layout.data_parallel_size:
            return self.whole["dp_shard"]
        return self.whole["dp_replicate", "dp_shard"]

    @property
    def dp_group(self) -> Any:
        """The process group over all replicas."""
        return self.dp.get_group()

    @property
    def pp_group(self) -> Any:
        """The process group over the stages of this replica."""
        return self.pp.get_group()

    @property
    def tp_group(self) -> Any:
        """The process group over the slices of a layer."""
        return self.tp.get_group()

    def stages_and_replicas(self) -> Any:
        """Makes the process group over the stages of all replicas; every rank must call this."""
        return _joined(self.whole, "pp", "dp_replicate", "dp_shard", name="pp_dp").get_group()


def _joined(whole: DeviceMesh, *axes: str, name: str) -> DeviceMesh:
    """Returns several axes as one, and makes its group."""
    joined = whole[axes]._flatten(name)
    wait_as_long(joined.get_group())
    return joined
