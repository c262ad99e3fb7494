"""The device mesh of a layout: the grid of ranks and the process group of each axis.

A `Mesh` is created from a `Layout` and an initialized process group. Every axis has a process group, even an axis of
size one, so that a collective over an axis needs no special case. All ranks create the same groups in the same order.
Each group has the timeout of the default group. A step asks for groups often, so each is looked up once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forgather.ml.distributed.group import apply_training_timeout
from forgather.ml.distributed.layout import Layout, Position


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks with one axis per kind of parallelism.

    Args:
        layout: the sizes of the axes.
        position: the coordinates of this rank.
        whole: the torch mesh with the axes "pp", "dp_replicate", "dp_shard", "cp" and "tp".
        dp: the data-parallel axis: "dp_replicate" and "dp_shard" flattened into one.
        shards: the mesh for `fully_shard`: the axis of the ranks that shard the weights, with "dp_replicate" before it
            for hybrid sharding. With context parallelism, that axis is "dp_shard" and "cp" flattened into one: these
            ranks have parts of the gradients of the same rows, which are summed when the shards are reduced.
    """

    layout: Layout
    position: Position
    whole: DeviceMesh
    dp: DeviceMesh
    shards: DeviceMesh

    @classmethod
    def create(cls, layout: Layout, device_type: str) -> Mesh:
        """Creates the mesh and the process groups of its axes. Collective: every rank must call it.

        Args:
            layout: the sizes of the axes, whose product is the world size.
            device_type: the device type, as in `torch.distributed.device_mesh.init_device_mesh`.
        """
        replicate = layout.data_parallel_size // layout.shard_size
        # "tp" is last and varies fastest: its ranks exchange activations within each layer and should share a machine.
        context, tensor = layout.context_parallel_size, layout.tensor_parallel_size
        sizes = (layout.pipeline_parallel_size, replicate, layout.shard_size, context, tensor)
        whole = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        # torch creates the groups of a mesh with its own default timeout.
        for group in whole.get_all_groups():
            apply_training_timeout(group)
        dp = _joined(whole, "dp_replicate", "dp_shard", name="dp")
        return cls(layout, layout.position(dist.get_rank()), whole, dp, _shards(whole, layout))

    @functools.cached_property
    def pp(self) -> DeviceMesh:
        """The pipeline-parallel axis of the mesh."""
        return self.whole["pp"]

    @functools.cached_property
    def tp(self) -> DeviceMesh:
        """The tensor-parallel axis of the mesh."""
        return self.whole["tp"]

    @property
    def dp_group(self) -> Any:
        """The process group of this rank along the data-parallel axis."""
        return self.dp.get_group()

    @functools.cached_property
    def pp_group(self) -> Any:
        """The process group of the pipeline stages of this rank's replica."""
        return self.pp.get_group()

    @functools.cached_property
    def tp_group(self) -> Any:
        """The process group of this rank along the tensor-parallel axis."""
        return self.tp.get_group()

    @functools.cached_property
    def cp_group(self) -> Any:
        """The process group of the ranks that divide the positions of the same rows."""
        return self.whole["cp"].get_group()

    @functools.cached_property
    def replica_coordinates(self) -> dict[str, int]:
        """The coordinate of this rank on each axis but the pipeline's, whose ranks have other weights each."""
        found = {axis: self.whole.get_local_rank(axis) for axis in ("dp_replicate", "dp_shard", "tp")}
        if (size := self.layout.context_parallel_size) > 1:
            found["dp_shard_cp"] = found.pop("dp_shard") * size + self.whole.get_local_rank("cp")
        return found

    def stages_and_replicas(self) -> Any:
        """Returns a new process group of all ranks with the same tensor-parallel rank: all stages of all replicas.

        Collective: every rank must call it.
        """
        return _joined(self.whole, "pp", "dp_replicate", "dp_shard", name="pp_dp").get_group()


def _shards(whole: DeviceMesh, layout: Layout) -> DeviceMesh:
    has_context = layout.context_parallel_size > 1
    axis = _joined(whole, "dp_shard", "cp", name="dp_shard_cp") if has_context else whole["dp_shard"]
    # With one axis only: `fully_shard` takes a mesh of two axes for hybrid sharding, with an all-reduce on top.
    if layout.shard_size == layout.data_parallel_size:
        return axis
    if not has_context:
        return whole["dp_replicate", "dp_shard"]
    # torch has no public way to put a flattened axis after another one.
    return DeviceMesh._concatenate([whole["dp_replicate"], axis])


def _joined(whole: DeviceMesh, *axes: str, name: str) -> DeviceMesh:
    """Returns a mesh in which several axes are flattened into one axis, and creates the process group of that axis."""
    # torch has no public way to flatten axes of a mesh into one with a process group.
    joined = whole[axes]._flatten(name)
    apply_training_timeout(joined.get_group())
    return joined
