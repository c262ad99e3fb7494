"""Traces of whole models: drawn from two shallow ones where the blocks of the model are alike.

`deep_traces` gives a `RankTrace` for each size of a window.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.extrapolation import DEEPER, SHALLOW, extrapolated, extrapolated_work
from forgather.ml.planner.rank_trace import MakeTrainer, trace_shapes
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.planner.trace_facts import TraceFacts
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.planner.window_shape import WindowShape


class DepthTraces(NamedTuple):
    """The traces of one size of the window.

    Args:
        shallow: the trace of the whole model, or of one of the depth `SHALLOW`.
        deeper: the trace of one of the depth `DEEPER`; None if the whole model was traced.
    """

    shallow: RankTrace
    deeper: RankTrace | None

    @property
    def deep(self) -> RankTrace:
        """The trace of the whole model."""
        return self.shallow if self.deeper is None else _deep_trace(self.shallow, self.deeper)

    def offloaded(self, parts: tuple[str, ...]) -> DepthTraces:
        """Returns the traces of a run that offloads parts of its state; of no parts, these."""
        if not parts:
            return self
        return DepthTraces(self.shallow.offloaded[parts], None if self.deeper is None else self.deeper.offloaded[parts])

    @property
    def keeping(self) -> DepthTraces | None:
        """The traces of the same run without recomputation; None if they were not asked for."""
        shallow, deeper = self.shallow.keeping, None if self.deeper is None else self.deeper.keeping
        return None if shallow is None else DepthTraces(shallow, deeper)

    @property
    def deep_facts(self) -> TraceFacts:
        """The facts of the whole model."""
        whole = self.shallow.whole
        if self.deeper is None or whole is None:
            return self.shallow.facts
        return self.shallow.facts.at_depth(self.deeper.facts, whole)


def depth_traces(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    shapes: Sequence[WindowShape],
    *,
    relay: Relay | None = None,
    device_type: str = "cpu",
    offloads: Sequence[tuple[str, ...]] = (),
    keeps_too: bool = False,
) -> list[DepthTraces]:
    """Returns the traces of a rank at the depths that are needed, for several sizes of its window.

    For the arguments see `trace_shapes`.
    """
    trace = functools.partial(
        trace_shapes,
        make_trainer,
        facts,
        shapes,
        relay=relay,
        device_type=device_type,
        offloads=offloads,
        keeps_too=keeps_too,
    )
    shallow = trace(depth=SHALLOW)
    if shallow[0].whole is None:
        return [DepthTraces(trace, None) for trace in shallow]
    deeper = trace(depth=DEEPER)
    return [DepthTraces(*pair) for pair in zip(shallow, deeper, strict=True)]


def deep_traces(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    shapes: Sequence[WindowShape],
    *,
    relay: Relay | None = None,
    device_type: str = "cpu",
) -> list[RankTrace]:
    """Returns the traces of a rank, for several sizes of its window. For the arguments see `trace_shapes`."""
    return [one.deep for one in depth_traces(make_trainer, facts, shapes, relay=relay, device_type=device_type)]


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
        repeated=extrapolated_work(shallow.repeated, deeper.repeated, whole),
    )
