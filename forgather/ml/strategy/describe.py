"""The layout of a run as lines of text.

The functions take a strategy after `build`. They return the sizes of its mesh axes and the lines that are printed when
a run starts. They do not communicate, so a dry run can print the same lines.
"""

from __future__ import annotations

from typing import Any

from forgather.ml.strategy.base import Strategy


def axes_of(strategy: Strategy) -> dict[str, int]:
    """Returns the size of each mesh axis, by name."""
    layout = strategy.layout
    return {
        "pipeline": layout.pipeline_parallel_size,
        "replicate": layout.data_parallel_size // layout.shard_size,
        "shard": layout.shard_size,
        "context": layout.context_parallel_size,
        "tensor": layout.tensor_parallel_size,
    }


def layout_lines(strategy: Strategy) -> list[str]:
    """Returns lines that describe which ranks have which part of the model, or an empty list for a single process.

    The first line is, for example, `layout     replicate 2  (DDP)`. With a pipeline, there is one further line per
    stage.
    """
    if strategy.topology.world_size == 1:
        return []
    axes = axes_of(strategy)
    sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    lines = [f"layout     {sizes}" + (f"  ({strategy.title})" if strategy.title else "")]
    return lines + (_stages(strategy) if hasattr(strategy, "placement") else [])


def _stages(strategy: Any) -> list[str]:
    layout = strategy.layout
    ranks = range(layout.pipeline_parallel_size)
    holders = {stage: rank for rank in ranks for stage in strategy.placement.stages_of(rank)}
    of = "of each pipeline" if layout.data_parallel_size > 1 else "of the pipeline"
    return [f"  {line}  (rank {holders[stage]} {of})" for stage, line in enumerate(strategy.plan.describe())]
