"""The parallel layout of a run: data-, context-, pipeline- and tensor-parallel sizes whose product is the world size.

A `Layout` is made from the configured sizes and the number of processes, and computes the position of each rank. It is
plain data and needs no process group. Tensor parallelism is the innermost (fastest varying) axis of the rank, then
context parallelism, then data parallelism, then pipeline stages, so that ranks which communicate most have adjacent
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from forgather.errors import DistributedError

_SIZES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "context_parallel_size")


@dataclass(frozen=True, slots=True)
class Position:
    """The coordinates of a rank, counted from 0: its pipeline stage, and its rank on each other axis."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parallel sizes of a run.

    Args:
        data_parallel_size: the number of replicas, each of which processes different rows.
        pipeline_parallel_size: the number of pipeline stages into which the layers of a replica are divided.
        tensor_parallel_size: the number of ranks over which each layer is sharded.
        context_parallel_size: the number of ranks over which the positions of each row are divided.
        shard_size: the number of data-parallel ranks over which the weights are sharded. 1 replicates the weights
            (DDP), `data_parallel_size` shards them fully (FSDP), and a divisor in between gives hybrid sharding.
            Sharded weights are also sharded over the context-parallel ranks.

    Raises:
        DistributedError: FG704 if a size is below 1, or if `shard_size` does not divide `data_parallel_size`.

    Example:
        >>> Layout(data_parallel_size=2, pipeline_parallel_size=2).position(3)
        Position(pipeline=1, data=1, tensor=0, context=0)
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    shard_size: int = 1

    def __post_init__(self) -> None:
        for name in (*_SIZES, "shard_size"):
            value = getattr(self, name)
            # `True` is an int in Python, and would count as 1.
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DistributedError(f"{name} is {value!r}", code="FG704", hint="give a whole number of at least 1")
        if self.data_parallel_size % self.shard_size:
            raise DistributedError(
                f"the weights cannot be sharded over {self.shard_size} of {self.data_parallel_size} replicas",
                code="FG704",
                hint=f"give a divisor of data_parallel_size={self.data_parallel_size}",
            )

    @classmethod
    def for_world(
        cls,
        world_size: int,
        *,
        data: int | None = None,
        pipeline: int | None = 1,
        tensor: int = 1,
        context: int = 1,
        shard: int | None = 1,
    ) -> Layout:
        """Returns the layout of `world_size` processes. Either the data-parallel or the pipeline size can be inferred.

        Args:
            world_size: the number of processes.
            data: the data-parallel size. None to infer it from the other sizes; but if `pipeline` is None too, the size
                is 1.
            pipeline: the pipeline-parallel size. None to infer it from the other sizes.
            tensor: the tensor-parallel size.
            context: the context-parallel size.
            shard: the number of data-parallel ranks over which the weights are sharded, or None for all of these ranks.

        Raises:
            DistributedError: FG704 if the product of the sizes is not the number of processes, if a size is below 1, or
                if `shard` does not divide the data-parallel size.
        """
        inner = tensor * context
        if pipeline is None:
            data = 1 if data is None else data
            pipeline = world_size // (data * inner) if world_size % (data * inner) == 0 else 0
        if data is None:
            data = world_size // (pipeline * inner) if world_size % (pipeline * inner) == 0 else 0
        # A size that could not be inferred is 0 here, so it fails this test too.
        if data * pipeline * inner != world_size:
            asked = dict(zip(_SIZES, (data, pipeline, tensor, context), strict=True))
            if context == 1:
                del asked["context_parallel_size"]
            shown = " x ".join(f"{name} {size}" for name, size in asked.items() if size)
            # The smallest number of processes that would fit, for the hint.
            needed = (data or 1) * (pipeline or 1) * inner
            raise DistributedError(
                f"{shown} does not give the {world_size} process{'es' if world_size > 1 else ''} of this run",
                code="FG704",
                hint=f"start {needed}, or a multiple of it if a size is not set: --nproc-per-node {needed} "
                f"(--world-size {needed} in a dry run)",
                expected=needed,
                found=world_size,
            ).about(next((name for name, size in asked.items() if size and size > 1), "data_parallel_size"))
        return cls(
            data_parallel_size=data,
            pipeline_parallel_size=pipeline,
            tensor_parallel_size=tensor,
            context_parallel_size=context,
            shard_size=data if shard is None else shard,
        )

    @property
    def world_size(self) -> int:
        """The number of processes: the product of the data-, pipeline-, tensor- and context-parallel sizes."""
        return self.pipeline_parallel_size * self.ranks_of_stage

    @property
    def ranks_of_stage(self) -> int:
        """The number of processes that have the same pipeline stage."""
        return self.data_parallel_size * self.context_parallel_size * self.tensor_parallel_size

    def position(self, rank: int) -> Position:
        """Returns the coordinates of a rank on the pipeline-, data-, context- and tensor-parallel axes."""
        # Must agree with the order of axes in `Mesh.create`, where the last axis varies fastest.
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        rest, context = divmod(rest, self.context_parallel_size)
        pipeline, data = divmod(rest, self.data_parallel_size)
        return Position(pipeline=pipeline, data=data, tensor=tensor, context=context)
