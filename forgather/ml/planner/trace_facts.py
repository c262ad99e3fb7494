"""What a trace tells about a run besides its memory and its work: strategy, sizes, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forgather.ml.planner.extrapolation import extrapolated_counts, line
from forgather.ml.planner.stored_state import StoredState


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """What a trace tells about the run besides its memory.

    Args:
        strategy: the name of the strategy class.
        mesh: the size of each mesh axis, by name.
        parameters: the number of elements of the model on this rank, as if nothing were sharded.
        trainable: the number of those that are trained.
        rows_per_update: the number of rows of one optimizer step, over all data-parallel ranks.
        tokens_per_row: the number of tokens of a row of the traced batch; None if rows have no token ids.
        num_pipeline_ranks: the number of ranks of one pipeline.
        stages: the numbers of the pipeline stages on this rank; empty without a pipeline.
        num_updates: the number of optimizer steps of the run.
        schedule: the name of the pipeline schedule; None without a pipeline.
        micro_batches: the number of micro-batches that one run of the schedule passes through the pipeline.
        schedule_runs: the number of runs of the schedule in an optimizer step.
        reduced_bytes: the bytes of the gradients that DDP sums in a step, which no operator shows.
        untraced: the bytes of what no operator allocates, by its use, such as the buckets of DDP.
        stored: the weights and the optimizer state of this rank, as if nothing were sharded.
        settings: the settings of `SETTINGS`, as the trainer has them.
        notes: what the trace leaves out, one sentence each.
    """

    strategy: str
    mesh: Mapping[str, int]
    parameters: int
    trainable: int
    rows_per_update: int
    tokens_per_row: int | None
    num_pipeline_ranks: int
    stages: tuple[int, ...]
    num_updates: int
    schedule: str | None
    micro_batches: int
    schedule_runs: int
    reduced_bytes: int
    untraced: Mapping[str, int]
    stored: StoredState
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def at_depth(self, deeper: TraceFacts, num_blocks: int) -> TraceFacts:
        """Returns the facts of a model with more blocks, on the line through the two depths that are traced."""
        return replace(
            self,
            parameters=line(self.parameters, deeper.parameters, num_blocks),
            trainable=line(self.trainable, deeper.trainable, num_blocks),
            reduced_bytes=line(self.reduced_bytes, deeper.reduced_bytes, num_blocks),
            untraced=extrapolated_counts(self.untraced, deeper.untraced, num_blocks),
            stored=self.stored.at_depth(deeper.stored, num_blocks),
        )
