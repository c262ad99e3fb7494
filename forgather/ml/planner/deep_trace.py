"""Traces of whole models: drawn from two shallow ones where the blocks of the model are alike.

`deep_traces` gives a `RankTrace` for each size of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.extrapolation import DEEPER, SHALLOW, extrapolated, extrapolated_work
from forgather.ml.planner.rank_trace import MakeTrainer, RankTrace, trace_shapes
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.planner.window_shape import WindowShape


def deep_traces(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    shapes: Sequence[WindowShape],
    *,
    relay: Relay | None = None,
    device_type: str = "cpu",
) -> list[RankTrace]:
    """Returns the traces of a rank, for several sizes of its window. For the arguments see `trace_shapes`."""
    shallow = trace_shapes(make_trainer, facts, shapes, depth=SHALLOW, relay=relay, device_type=device_type)
    if shallow[0].whole is None:
        return shallow
    deeper = trace_shapes(make_trainer, facts, shapes, depth=DEEPER, relay=relay, device_type=device_type)
    return [_deep_trace(low, high) for low, high in zip(shallow, deeper, strict=True)]


def _deep_trace(shallow: RankTrace, deeper: RankTrace) -> RankTrace:
    whole = shallow.whole
    assert whole is not None, "the model was shortened"  # noqa: S101
    return RankTrace(
        num_blocks=whole,
        peaks=extrapolated(shallow.peaks, deeper.peaks, whole),
        allocations=deeper.allocations,
        facts=shallow.facts.at_depth(deeper.facts, whole),
        operations=extrapolated_work(shallow.operations, deeper.operations, whole),
        messages=extrapolated_work(shallow.messages, deeper.messages, whole),
    )
