"""Who holds what, in a line or two for people.

Takes a strategy that is built; gives the sizes of its axes and the lines that a run begins with. Keeps true: nothing is
sent, and a strategy that was built for a dry run is told of in the same words.
"""

from __future__ import annotations

from typing import Any

from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.base import Strategy

_WORDS = {
    "DataParallel": "DDP",
    "DeepSpeedZero": "DeepSpeed",
    "Sharded": "FSDP2",
}


def layout_of(strategy: Strategy) -> Layout:
    """Returns the sizes of a strategy; those of one process where it has none."""
    mesh = getattr(strategy, "mesh", None)
    found = mesh.layout if mesh is not None else getattr(strategy, "layout", None)
    return found if isinstance(found, Layout) else Layout()


def axes_of(strategy: Strategy) -> dict[str, int]:
    """Returns the sizes of the axes by name."""
    layout = layout_of(strategy)
    return {
        "pipeline": layout.pipeline_parallel_size,
        "replicate": layout.data_parallel_size // layout.shard_size,
        "shard": layout.shard_size,
        "tensor": layout.tensor_parallel_size,
    }


def description(strategy: Strategy) -> list[str]:
    """Returns the lines that tell who holds what in a run of several processes; none for one process.

    As in `layout     replicate 2  (DDP)`; a pipeline has a line for each stage.
    """
    if strategy.topology.world_size == 1:
        return []
    axes = axes_of(strategy)
    sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    name = type(strategy).__name__
    kind = "tensor parallel" if name == "Sharded" and axes["shard"] == 1 else _WORDS.get(name, "")
    kind = getattr(strategy, "schedule", kind)
    lines = [f"layout     {sizes}" + (f"  ({kind})" if kind else "")]
    return lines + (_stages(strategy) if hasattr(strategy, "placement") else [])


def _stages(strategy: Any) -> list[str]:
    layout = layout_of(strategy)
    ranks = range(layout.pipeline_parallel_size)
    holders = {stage: rank for rank in ranks for stage in strategy.placement.stages_of(rank)}
    of = "of each pipeline" if layout.data_parallel_size > 1 else "of the pipeline"
    return [f"  {line}  (rank {holders[stage]} {of})" for stage, line in enumerate(strategy.plan.describe())]
