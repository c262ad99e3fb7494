"""The pipelines among the ways to train a config: sizes, schedules, recomputation, and divisions of an update.

Takes a number of devices and the rows of an update; gives `Choice`s, and for each the `Division`s of an update. What
cannot be better than another pipeline is left out, and `LEFT_OUT` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from forgather.pipeline_schedules import SCHEDULES
from forgather.planner.choices import CHUNKS, PIPELINE_TRAINER, RECOMPUTE, SCHEDULE, Choice

TITLES = {
    "Schedule1F1B": "1F1B",
    "ScheduleInterleaved1F1B": "interleaved 1F1B",
    "ScheduleInterleavedZeroBubble": "interleaved zero bubble",
    "ScheduleZBVZeroBubble": "ZBV",
    "ScheduleDualPipeV": "DualPipeV",
}
"""The schedules that are searched, with their names in tables."""
LEFT_OUT = (
    "GPipe and looped BFS take the time of 1F1B and interleaved 1F1B, and keep more micro-batches",
    "micro-batches of several rows keep more, and a pipeline waits longer for them",
    "stages whose weights are sharded (FSDP2) or sliced (tensor parallel) are not searched",
)
"""What is not searched, and why, one sentence each."""
MOST_CHUNKS = 128
"""The most micro-batches of one run of a schedule: torch keeps the buffers of all of them until the end of a run."""
_MOST_DIVISIONS = 3


class Division(NamedTuple):
    """A division of an update among micro-batches of one row.

    Args:
        chunks: the number of micro-batches of a run of the schedule.
        runs: the number of runs of the schedule in an update.
    """

    chunks: int
    runs: int


def pipeline_choices(gpus: int, nodes: int) -> tuple[Choice, ...]:
    """Returns the pipelines for some devices, without recomputation first, which is faster where it fits.

    Args:
        gpus: the number of devices of a machine.
        nodes: the number of machines.
    """
    return tuple(_choices(gpus * nodes))


def _choices(world: int) -> Iterator[Choice]:
    for recomputes in (False, True):
        for ranks in range(2, world + 1):
            if world % ranks:
                continue
            replicas = world // ranks
            for schedule, name in TITLES.items():
                beside = f" x DDP {replicas}" if replicas > 1 else ""
                ending = ", recomputed" if recomputes else " without recomputation"
                yield Choice(
                    title=f"pipeline {ranks}{beside}, {name}{ending}",
                    trainer=PIPELINE_TRAINER,
                    settings={
                        SCHEDULE: schedule,
                        "pipeline_parallel_size": ranks,
                        "data_parallel_size": replicas,
                        "stages_per_rank": SCHEDULES[schedule].usual_stages,
                        RECOMPUTE: recomputes,
                    },
                    processes=world,
                    replicas=replicas,
                    divided=(ranks, ranks, ranks),
                )


def divisions(choice: Choice, rows: int) -> tuple[Division, ...]:
    """Returns the divisions of an update that a pipeline allows, at most three, the most micro-batches first.

    More micro-batches of a run make a pipeline wait for a smaller part of it, and need more memory.

    Args:
        choice: the pipeline.
        rows: the rows of an update of all replicas.

    Returns:
        The divisions; empty if the rows cannot be divided among the replicas, or if the schedule allows no division.

    Example:
        >>> from dataclasses import replace
        >>> first = pipeline_choices(8, 1)[-1]
        >>> divisions(first, 256)
        (Division(chunks=128, runs=2), Division(chunks=32, runs=8), Division(chunks=16, runs=16))
    """
    own, rest = divmod(rows, choice.replicas)
    if rest:
        return ()
    legal = [chunks for chunks in range(min(own, MOST_CHUNKS), 1, -1) if own % chunks == 0 and _allows(choice, chunks)]
    found: list[int] = []
    for chunks in legal:
        if not found or chunks * 4 <= found[-1] or chunks == legal[-1]:
            found.append(chunks)
    kept = dict.fromkeys((*found[: _MOST_DIVISIONS - 1], *found[-1:]))
    return tuple(Division(chunks, own // chunks) for chunks in kept)


def _allows(choice: Choice, chunks: int) -> bool:
    """Returns whether a schedule can run a number of micro-batches, as `num_micro_batches` of the strategy says."""
    facts = SCHEDULES[choice.settings[SCHEDULE]]
    ranks = choice.settings["pipeline_parallel_size"]
    stages = ranks * choice.settings["stages_per_rank"]
    if facts.chunk_per_stage and chunks < stages:
        return False
    rounds = max(1, chunks // ranks)
    return not facts.rounds or chunks % rounds == 0


def settings_of(choice: Choice, division: Division, split_spec: dict[str, str] | None = None) -> dict[str, object]:
    """Returns the settings of a pipeline with a division of an update and with cuts.

    Args:
        choice: the pipeline.
        division: the division.
        split_spec: the cuts; None for those of the strategy.
    """
    cuts = {} if split_spec is None else {"split_spec": split_spec}
    return {**choice.settings, CHUNKS: division.chunks, **cuts}
