"""Pipeline bubbles: how long ranks wait, according to a simulation of torch's schedules and to published formulas.

`simulate` takes the name of a schedule, sizes, and the times of a micro-batch. It returns a `Simulation` with the step
time, the share of idle time, and the number of micro-batches in flight. The order of actions is that of torch's
schedule object. An action starts as soon as its rank is free and its inputs have arrived. No process group is needed.

Letters in formulas: p is the number of ranks, m the number of micro-batches, v the number of stages per rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

# Private, but torch has no public function that lists the actions of a schedule without a process group.
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from forgather.errors import TrainingError, nearest
from forgather.pipeline_schedules import SCHEDULES, ScheduleFacts


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of one micro-batch in one stage, in any unit of time.

    Args:
        forward: the time of the forward pass.
        backward_input: the time to compute the gradients of the inputs.
        backward_weight: the time to compute the gradients of the weights.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    @property
    def total(self) -> float:
        """The sum of the three times."""
        return self.forward + self.backward_input + self.backward_weight

    def of(self, kind: str) -> float:
        """Returns the time of an action.

        Args:
            kind: the kind of action: F for forward, I for the gradients of inputs, W for the gradients of weights, or B
                for both gradients.
        """
        if kind == "B":
            return self.backward_input + self.backward_weight
        return {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}[kind]

    def as_first(self) -> StageTimes:
        """Returns the times of the first stage under a schedule that splits backward passes.

        The inputs of the first stage need no gradients, so torch runs the whole backward pass of the stage as the
        action W.
        """
        return StageTimes(self.forward, 0.0, self.backward_input + self.backward_weight)


@dataclass(frozen=True, slots=True)
class Event:
    """One action of one rank.

    Args:
        rank: the rank that computes the action.
        stage: the number of the stage.
        kind: the kind of action: F for forward, I for the gradients of inputs, W for the gradients of weights, or B for
            both gradients.
        micro_batch: the number of the micro-batch.
        start: the time at which the action begins.
        end: the time at which the action ends.

    Units:
        The times are in the unit of the given `StageTimes`.
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step of a pipeline.

    Args:
        step_time: the time from the first action to the end of the last action.
        busy: for each rank, the time in which it computes.
        in_flight: for each rank, the largest number of micro-batches whose activations it keeps at the same time. The
            activations of one micro-batch in one of the rank's v stages add 1/v.
        events: all actions, in the order of their start times.

    Units:
        The times are in the unit of the given `StageTimes`.
    """

    step_time: float
    busy: tuple[float, ...]
    in_flight: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def idle_share(self) -> float:
        """The share of the total time of all ranks in which the ranks wait."""
        return 1 - sum(self.busy) / (self.step_time * len(self.busy))


def _known_facts(schedule: str) -> ScheduleFacts:
    if schedule not in SCHEDULES:
        raise TrainingError(
            f"no schedule {schedule!r}",
            code="FG756",
            hint=nearest(schedule, list(SCHEDULES)) or "one of: " + ", ".join(SCHEDULES),
        )
    return SCHEDULES[schedule]


# Cached, since torch constructs a schedule object to list its actions.
@functools.lru_cache(maxsize=64)
def actions_of(
    schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int
) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """Returns the actions of each rank in order, each as (stage, kind, micro-batch), as in torch's schedule object.

    The kind is F for forward, I for the gradients of inputs, W for the gradients of weights, or B for both gradients.

    Args:
        schedule: the name of a schedule.
        num_ranks: the number of ranks.
        num_micro_batches: the number of micro-batches.
        stages_per_rank: the number of stages per rank.

    Raises:
        TrainingError: FG756 if the schedule is unknown, or if the schedule refuses the sizes.
    """
    _known_facts(schedule)
    try:
        order = get_schedule_ops(schedule.removeprefix("Schedule"), num_ranks, num_micro_batches, stages_per_rank)
    except (ValueError, AssertionError) as error:
        raise TrainingError(
            f"{schedule} cannot run {num_micro_batches} micro-batches on {num_ranks} ranks with {stages_per_rank} "
            f"stages each: {error}",
            code="FG756",
            hint="change pipeline_chunks or stages_per_rank",
        ) from None
    ranks = []
    for actions in order:
        found: list[tuple[int, str, int]] = []
        for action in actions:
            if action is None:
                continue
            # torch runs the two actions of an overlapped pair one after the other.
            for part in action.sub_actions or (action,):
                if part.is_compute_op and part.microbatch_index is not None:
                    found.append((part.stage_index, part.computation_type.value, part.microbatch_index))
        ranks.append(_counted_from_zero(found))
    return tuple(ranks)


def _counted_from_zero(actions: Sequence[tuple[int, str, int]]) -> tuple[tuple[int, str, int], ...]:
    """Returns the actions with micro-batches numbered from 0.

    On the last rank of 1F1B, torch 2.13 lists the micro-batches of forward passes from 1, although it runs them from 0.
    """
    least: dict[tuple[int, str], int] = {}
    for stage, kind, micro_batch in actions:
        # Only the numbers of forward passes are wrong; I and B use the same numbers.
        if kind == "F":
            least[(stage, kind)] = min(micro_batch, least.get((stage, kind), micro_batch))
    return tuple((stage, kind, number - least.get((stage, kind), 0)) for stage, kind, number in actions)


def simulate(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    stages_per_rank: int | None = None,
    times: StageTimes | Sequence[StageTimes] = StageTimes(),  # noqa: B008 - frozen
    send_time: float = 0.0,
) -> Simulation:
    """Returns a simulated step of a pipeline.

    Args:
        schedule: the name of one of torch's schedules, such as "Schedule1F1B".
        num_ranks: the number of ranks in the pipeline.
        num_micro_batches: the number of micro-batches in a step.
        stages_per_rank: the number of stages per rank. None for the schedule's usual number.
        times: the times of each stage, or one `StageTimes` for all stages.
        send_time: the time between the end of an action and the arrival of its result on another rank.

    Units:
        All times are in the same unit, which the caller chooses.

    Raises:
        TrainingError: FG756 if the schedule is unknown, or if the schedule refuses the sizes.
        ValueError: if the number of times is not the number of stages.
    """
    per_rank = stages_per_rank or _known_facts(schedule).usual_stages
    num_stages = per_rank * num_ranks
    stage_times = [times] * num_stages if isinstance(times, StageTimes) else list(times)
    if len(stage_times) != num_stages:
        raise ValueError(f"times are given for {len(stage_times)} stages, and there are {num_stages}")
    queues = actions_of(schedule, num_ranks, num_micro_batches, per_rank)
    rank_of = {stage: rank for rank, queue in enumerate(queues) for stage, _, _ in queue}
    position, clock = [0] * num_ranks, [0.0] * num_ranks
    done: dict[tuple[int, str, int], float] = {}
    events: list[Event] = []
    while any(position[rank] < len(queues[rank]) for rank in range(num_ranks)):
        before = len(events)
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                stage, kind, micro_batch = queue[position[rank]]
                ready = _ready(done, rank_of, num_stages, queue[position[rank]], send_time)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + stage_times[stage].of(kind)
                done[(stage, "I" if kind == "B" else kind, micro_batch)] = clock[rank]
                events.append(Event(rank, stage, kind, micro_batch, start, clock[rank]))
                position[rank] += 1
        assert len(events) > before, "torch's order of actions waits for itself"  # noqa: S101
    busy = [sum(event.end - event.start for event in events if event.rank == rank) for rank in range(num_ranks)]
    return Simulation(
        step_time=max(event.end for event in events),
        busy=tuple(busy),
        in_flight=tuple(_in_flight(queue, per_rank) for queue in queues),
        events=tuple(sorted(events, key=lambda event: (event.start, event.rank))),
    )


def _ready(
    done: dict[tuple[int, str, int], float],
    rank_of: dict[int, int],
    num_stages: int,
    action: tuple[int, str, int],
    send_time: float,
) -> float | None:
    """Returns the time at which the inputs of an action have arrived, or None if they are not computed yet."""
    stage, kind, micro_batch = action
    if kind == "W" or (kind == "F" and stage == 0):
        return 0.0  # the order of its own rank suffices
    if kind == "F":
        other = stage - 1
        needed = (other, "F", micro_batch)
    elif stage == num_stages - 1:
        other, needed = stage, (stage, "F", micro_batch)
    else:
        other = stage + 1
        needed = (other, "I", micro_batch)
    if needed not in done:
        return None
    return done[needed] + (send_time if rank_of[other] != rank_of[stage] else 0.0)


def _in_flight(queue: Sequence[tuple[int, str, int]], stages_per_rank: int) -> float:
    """Returns the largest number of micro-batches whose activations a rank keeps at the same time.

    The activations of a micro-batch are kept from its forward pass until the gradients of the stage's inputs are
    computed. A micro-batch adds 1/v for each of the rank's v stages.
    """
    held = most = 0
    for _, kind, _ in queue:
        held += {"F": 1, "B": -1, "I": -1}.get(kind, 0)
        most = max(most, held)
    return most / stages_per_rank


def idle_formula(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    stages_per_rank: int | None = None,
    times: StageTimes = StageTimes(),  # noqa: B008 - frozen
) -> float:
    """Returns the idle share of a step with equal stages and free communication.

    Args:
        schedule: the name of one of torch's schedules.
        num_ranks: the number of ranks, p.
        num_micro_batches: the number of micro-batches, m, which must be at least the number of stages.
        stages_per_rank: the number of stages per rank, v. None for the schedule's usual number.
        times: the times of each stage.

    Raises:
        TrainingError: FG756 if the schedule is unknown.
        ValueError: if the schedule is V-shaped and the times are unequal. No formula exists for this case; use
            `simulate`.

    Source:
        GPipe and 1F1B: (p-1)/(m+p-1). Interleaved: (p-1)/(vm+p-1), Narayanan et al. 2021, section 2.2. Zero bubble: Qi
            et al. 2023, section 2.3. In a synchronous step, torch's V-shaped schedules are idle while the pipeline
            fills.
    """
    facts = _known_facts(schedule)
    v = stages_per_rank or facts.usual_stages
    p, m = num_ranks, num_micro_batches
    if facts.one_stage:
        return (p - 1) / (m + p - 1)
    if not facts.splits_backward:
        return (p - 1) / (v * m + p - 1)
    if facts.v_shaped and not times.forward == times.backward_input == times.backward_weight:
        raise ValueError(f"{schedule} has a formula for equal times only; simulate it")
    fill = (p - 1) * (times.forward + max(0.0, times.backward_input - times.backward_weight))
    return fill / (fill + v * m * times.total)
