"""The placement of stages on ranks, and the number of micro-batches, as a schedule allows them.

Takes the name of a schedule and sizes; gives a `Placement` and a number of micro-batches. Keeps true: no process group
is needed, and sizes that torch would refuse on one rank, while the others wait, are refused on every rank before
anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from forgather.errors import DistributedError, nearest
from forgather.pipeline_schedules import SCHEDULES, ScheduleFacts


def facts_of(name: str) -> ScheduleFacts:
    """Returns what holds for a schedule.

    Raises:
        DistributedError: FG760 for a name that torch does not know.
    """
    if name not in SCHEDULES:
        raise DistributedError(f"no schedule {name!r}", code="FG760", hint=nearest(name, list(SCHEDULES)))
    return SCHEDULES[name]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank of a pipeline holds which stages.

    Args:
        num_ranks: ranks of the pipeline.
        stages_per_rank: stages that each of them holds.
        v_shaped: the second stages lie in the reverse order of the first ones.

    Example:
        >>> Placement(2, 2, v_shaped=False).stages_of(0), Placement(2, 2, v_shaped=True).stages_of(0)
        ((0, 2), (0, 3))
    """

    num_ranks: int
    stages_per_rank: int
    v_shaped: bool

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank, in their order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def rank_of(self, stage: int) -> int:
        """Returns the rank that holds a stage."""
        turn, position = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - position if self.v_shaped and turn % 2 else position

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.rank_of(self.num_stages - 1)


def place_stages(name: str, num_ranks: int, *, stages_per_rank: int | None, num_stages: int | None) -> Placement:
    """Returns which rank holds which stages.

    Args:
        name: the schedule.
        num_ranks: ranks of the pipeline.
        stages_per_rank: stages that each rank holds; None for what the number of stages or the schedule says.
        num_stages: stages that the model is cut into; None where that is left to the schedule.

    Raises:
        DistributedError: FG760 where schedule, stages and ranks do not fit together.
    """
    facts = facts_of(name)
    if stages_per_rank is None:
        if num_stages is not None:
            if num_stages % num_ranks:
                raise _no_fit(
                    f"the model is cut into {num_stages} stages, which {num_ranks} ranks cannot share evenly",
                    f"cut it into {num_ranks} stages, or a multiple of that",
                )
            stages_per_rank = num_stages // num_ranks
        else:
            stages_per_rank = facts.usual_stages
    elif num_stages is not None and num_stages != num_ranks * stages_per_rank:
        raise _no_fit(
            f"the model is cut into {num_stages} stages, and {num_ranks} ranks with stages_per_rank "
            f"{stages_per_rank} hold {num_ranks * stages_per_rank}",
            f"give a split_spec with {num_ranks * stages_per_rank - 1} cuts, or change stages_per_rank",
        )
    if facts.one_stage and stages_per_rank != 1:
        raise _no_fit(
            f"{name} runs one stage on each rank, and there are {stages_per_rank}",
            f"use ScheduleInterleaved1F1B, or cut the model into {num_ranks} stages",
        )
    if facts.v_shaped and stages_per_rank != 2:
        raise _no_fit(
            f"{name} runs two stages on each rank, and there {'is' if stages_per_rank == 1 else 'are'} "
            f"{stages_per_rank}",
            f"cut the model into {2 * num_ranks} stages",
        )
    return Placement(num_ranks, stages_per_rank, facts.v_shaped)


def _no_fit(message: str, hint: str) -> DistributedError:
    return DistributedError(message, code="FG760", hint=hint).about("schedule_class")


def num_micro_batches(name: str, placement: Placement, rows: int, asked: int | None) -> int:
    """Returns into how many micro-batches the rows of one step go.

    Args:
        name: the schedule.
        placement: where the stages lie.
        rows: rows of one step of one replica.
        asked: what the settings say; None for as many as there are stages, where the rows allow it.

    Raises:
        DistributedError: FG761 where the schedule or the rows do not allow it.
    """
    legal = [chunks for chunks in range(1, rows + 1) if _obstacle(name, placement, rows, chunks) is None]
    is_set = asked is not None
    if asked is None:
        enough = [chunks for chunks in legal if chunks >= placement.num_stages]
        if legal:
            return enough[0] if enough else legal[-1]
        asked = placement.num_stages
    obstacle = _obstacle(name, placement, rows, asked)
    if obstacle is None:
        return asked
    possible = ", ".join(map(str, legal[:10]))
    also = f", and pipeline_chunks to {placement.num_stages} or more" if is_set else ""
    raise DistributedError(
        obstacle,
        code="FG761",
        hint=f"with this batch size, set pipeline_chunks to one of: {possible}"
        if legal
        else f"set per_device_train_batch_size to a multiple of {placement.num_stages}{also}",
    ).about("pipeline_chunks" if is_set else "schedule_class")


def _obstacle(name: str, placement: Placement, rows: int, chunks: int) -> str | None:
    """Returns why rows cannot go into so many micro-batches; None where they can."""
    facts = facts_of(name)
    if rows % chunks:
        return f"{rows} rows (per_device_train_batch_size) cannot be split evenly into {chunks} micro-batches"
    if facts.chunk_per_stage and chunks < placement.num_stages:
        return f"{name} needs as many micro-batches as stages ({placement.num_stages}), and there are {chunks}"
    if facts.rounds and chunks % (rounds := max(1, chunks // placement.num_ranks)):
        return (
            f"{name} runs {chunks} micro-batches on {placement.num_ranks} ranks in {rounds} rounds, "
            f"which they do not fill evenly"
        )
    return None
