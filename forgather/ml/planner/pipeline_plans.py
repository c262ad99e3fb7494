"""The plans of pipelines with any schedule, sizes and cuts, from the stages of two traced ranks.

`PipelinePlans` has a `StageFamily` for schedules that compute a backward pass as one, and one for those that divide it.
A plan has the memory of each rank by torch's order of passes, and the work of each rank by the work of its passes.

Units:
    bytes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forgather.ml.planner.allocations import Region
from forgather.ml.planner.family_trace import FAMILY_CUTS, FAMILY_PARTS
from forgather.ml.planner.memory import plan_of
from forgather.ml.planner.pass_shape import IrregularPassError, TooFewBlocksError, added
from forgather.ml.planner.peaks import Peak
from forgather.ml.planner.rank_recorder import BATCH, COMMUNICATION, TEMPORARIES
from forgather.ml.planner.schedule_replay import ALTERNATING, Action, Replayed, replayed
from forgather.ml.planner.stage_family import StageFamily, trace_family
from forgather.ml.planner.stage_variants import FIRST, LAST, MIDDLE, Adds, Effect, PassWork, Turn, Variant
from forgather.ml.planner.stored_state import StoredState
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.strategy.gradients import BUCKET_BYTES
from forgather.ml.strategy.pipeline.bubble_simulation import actions_of
from forgather.ml.strategy.pipeline.schedules import Placement
from forgather.pipeline_schedules import SCHEDULES
from forgather.planner.efficiency import Efficiency
from forgather.planner.hardware import Hardware
from forgather.planner.memory_plan import GRADIENTS, OPTIMIZER, PARAMETERS
from forgather.planner.stage_cuts import UnitCosts, balanced_cuts
from forgather.planner.step_time import operation_seconds
from forgather.planner.work import Message, Operation, RunWork

__all__ = [
    "IrregularPassError",
    "PipelinePlans",
    "PipelineSizes",
    "TooFewBlocksError",
    "family_settings",
    "trace_family",
]


@dataclass(frozen=True, kw_only=True)
class PipelineSizes:
    """The schedule and the sizes of a pipeline.

    Args:
        schedule: the name of the schedule.
        ranks: the number of ranks of a pipeline.
        stages_per_rank: the number of stages on a rank.
        replicas: the number of pipelines that read different rows.
        rows: the rows of a micro-batch of the schedule.
        parts: the number of micro-batches of a run of the schedule.
        runs: the number of runs of the schedule in an update.
        cuts: for each stage except the last, the number of blocks up to its end.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    replicas: int
    rows: int
    parts: int
    runs: int
    cuts: tuple[int, ...]

    @property
    def placement(self) -> Placement:
        """The ranks of the stages."""
        return Placement(self.ranks, self.stages_per_rank, SCHEDULES[self.schedule].v_shaped)

    def place_of(self, stage: int) -> str:
        """Returns the place of a stage: `FIRST`, `MIDDLE` or `LAST`."""
        return FIRST if stage == 0 else LAST if stage == len(self.cuts) else MIDDLE


class PipelinePlans:
    """The plans of pipelines that differ in their schedule and sizes.

    Args:
        make_family: a function that traces the stages, of whether the schedule divides backward passes.
        device_type: the kind of device, "cpu" or "cuda".
    """

    def __init__(self, make_family: Callable[[bool], StageFamily], *, device_type: str) -> None:
        self._make_family = make_family
        self._device_type = device_type
        self._families: dict[bool, StageFamily | Exception] = {}
        self._cuts: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def family(self, *, divides_backward: bool) -> StageFamily:
        """Returns the stages, which are traced once.

        Raises:
            IrregularPassError: if stages do not follow from the traces.
            Exception: if the code of the model does not fit its settings.
        """
        if divides_backward not in self._families:
            try:
                self._families[divides_backward] = self._make_family(divides_backward)
            except Exception as error:  # noqa: BLE001 - code of the user's model, which would fail in the same way again
                self._families[divides_backward] = error
        found = self._families[divides_backward]
        if isinstance(found, Exception):
            raise found
        return found

    def split_spec(self, schedule: str, ranks: int, stages_per_rank: int, hardware: Hardware) -> dict[str, str]:
        """Returns the cuts with the shortest slowest stage, as a mapping for `split_spec`. Later plans have these cuts.

        Args:
            schedule: the name of the schedule.
            ranks: the number of ranks of a pipeline.
            stages_per_rank: the number of stages on a rank.
            hardware: the device; if its rates are unknown, the cost of a part is that of `unit_costs`.
        """
        family = self.family(divides_backward=SCHEDULES[schedule].splits_backward)
        costs = _part_costs(family, hardware)
        cuts = _with_two_blocks_at_ends(balanced_cuts(costs, ranks * stages_per_rank), family.num_blocks)
        self._cuts[schedule, ranks, stages_per_rank] = cuts
        first = family.parts.plan.blocks.block_name(0)
        return {f"{first.removesuffix('0')}{cut - 1}": "end" for cut in cuts}

    def plan(
        self,
        schedule: str,
        ranks: int,
        stages_per_rank: int,
        *,
        replicas: int,
        rows: int,
        parts: int,
        runs: int,
        local_world_size: int,
    ) -> tuple[dict[str, Any], RunWork]:
        """Returns the plan and the work of a pipeline with the cuts of `split_spec`; for sizes see `PipelineSizes`.

        Raises:
            IrregularPassError: if the pipeline does not follow from traces of other ones.
        """
        sizes = PipelineSizes(
            schedule=schedule,
            ranks=ranks,
            stages_per_rank=stages_per_rank,
            replicas=replicas,
            rows=rows,
            parts=parts,
            runs=runs,
            cuts=self._cuts[schedule, ranks, stages_per_rank],
        )
        return self.plan_of_sizes(sizes, local_world_size=local_world_size)

    def plan_of_sizes(self, sizes: PipelineSizes, *, local_world_size: int) -> tuple[dict[str, Any], RunWork]:
        """Returns the plan and the work of a pipeline, see `plan_of`.

        Args:
            sizes: the schedule and the sizes.
            local_world_size: the number of processes on one machine.

        Raises:
            IrregularPassError: if the pipeline does not follow from traces of other ones.
        """
        drawn = _Drawn(self, sizes)
        return plan_of(
            [drawn.rank(rank) for rank in range(sizes.ranks)],
            [],
            world_size=sizes.ranks * sizes.replicas,
            local_world_size=min(local_world_size, sizes.ranks * sizes.replicas),
            device_type=self._device_type,
        )


def family_settings(*, divides_backward: bool) -> dict[str, Any]:
    """Returns the settings of the trainer whose stages `trace_family` traces.

    Args:
        divides_backward: whether the schedule divides backward passes.
    """
    return {
        "schedule_class": "ScheduleInterleavedZeroBubble" if divides_backward else "ScheduleInterleaved1F1B",
        "pipeline_chunks": FAMILY_PARTS,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 1,
        "stages_per_rank": 2,
        "split_spec": dict(FAMILY_CUTS),
    }


def _with_two_blocks_at_ends(cuts: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    """Returns cuts with at least two blocks at both ends: stages with fewer do not follow from the traces."""
    least = [max(cut, 2 + stage) for stage, cut in enumerate(cuts)]
    most = [num_blocks - 2 - after for after in reversed(range(len(cuts)))]
    return tuple(min(cut, limit) for cut, limit in zip(least, most, strict=True))


def _part_costs(family: StageFamily, hardware: Hardware) -> UnitCosts:
    """Returns the seconds of each part for one micro-batch; without rates of the device, its share of the work."""
    if not hardware.gives_times:
        shares = family.parts.shares
        return UnitCosts(before=shares.before, blocks=(shares.blocks[1],) * family.num_blocks, after=shares.after)

    def seconds(place: str, num_blocks: int) -> float:
        return sum(
            operation_seconds(operation, hardware, Efficiency()).high * count
            for kind in family.kinds
            for operation, count in family.work(Variant(place, kind, Turn.LATER), num_blocks).operations.items()
        )

    block = seconds(MIDDLE, 4) - seconds(MIDDLE, 3)
    before, after = (max(0.0, seconds(place, 3) - seconds(MIDDLE, 3)) for place in (FIRST, LAST))
    return UnitCosts(before=before, blocks=(block,) * family.num_blocks, after=after)


class _Drawn:
    def __init__(self, plans: PipelinePlans, sizes: PipelineSizes) -> None:
        self._plans = plans
        self._sizes = sizes
        self._whole = plans.family(divides_backward=SCHEDULES[sizes.schedule].splits_backward)
        self._queues = actions_of(sizes.schedule, sizes.ranks, sizes.parts, sizes.stages_per_rank)
        self._masks = self._whole.masks(sizes.rows, sizes.parts, min(2, sizes.runs))
        edges = (0, *sizes.cuts, self._whole.num_blocks)
        self._blocks = [stop - start for start, stop in zip(edges, edges[1:], strict=False)]
        if min(self._blocks) < 1 or min(self._blocks[0], self._blocks[-1]) < 2:
            raise TooFewBlocksError(f"the stages have {', '.join(map(str, self._blocks))} blocks, one at an end")
        if not self._starts_in_order():
            raise IrregularPassError("the schedule does not begin its backward passes with the first micro-batch")

    def _starts_in_order(self) -> bool:
        """Returns whether the first backward pass of each stage is that of the first micro-batch, as in the traces."""
        first: dict[int, int] = {}
        for queue in self._queues:
            for stage, kind, micro_batch in queue:
                if kind in "BW":
                    first.setdefault(stage, micro_batch)
        return not any(first.values())

    def _family(self, kind: str) -> StageFamily:
        # A schedule that divides backward passes may compute some of them as one.
        return self._plans.family(divides_backward=False) if kind == "B" else self._whole

    def _variant(self, action: Action, *, adds: bool) -> Variant:
        """Returns the pass of the first run, or of a later one, which adds to gradients and has other rows."""
        stage, kind, micro_batch = action
        turn = self._family(kind).turn(micro_batch, self._masks[adds])
        place = self._sizes.place_of(stage)
        waits = self._sizes.schedule == ALTERNATING and place == LAST
        # The last stage of the same rank has made the gradients of tied weights before.
        tied = (
            Adds.TIED if place == FIRST and self._has_both_ends(self._sizes.placement.rank_of(stage)) else Adds.NOTHING
        )
        return Variant(place, kind, turn, waits, Adds.NOTHING if kind == "F" else Adds.ALL if adds else tied)

    def _has_both_ends(self, rank: int) -> bool:
        stages = self._sizes.placement.stages_of(rank)
        return 0 in stages and len(self._sizes.cuts) in stages

    def _effect(self, action: Action, *, adds: bool) -> Effect:
        stage, kind, _ = action
        return self._family(kind).effect(self._variant(action, adds=adds), self._blocks[stage])

    def rank(self, rank: int) -> RankTrace:
        """Returns what a trace of a rank would give, besides its allocations."""
        sizes, family = self._sizes, self._whole
        stages = sizes.placement.stages_of(rank)
        places = [sizes.place_of(stage) for stage in stages]
        place = LAST if LAST in places else FIRST if FIRST in places else MIDDLE
        trained = self._sum(family.trained, stages) - self._has_both_ends(rank) * family.tied.trained
        base = self._base(rank)
        gradients: dict[str, int] = {}
        peaks: dict[Region, Peak] = {}
        for run in range(min(2, sizes.runs)):
            found = self._replayed(rank, adds=run > 0)
            start = added(added(base, family.prologue(place, sizes.parts)), gradients)
            peak = Peak(0, added(start, found.peak), found.made_by)
            peak.num_bytes = sum(peak.categories.values())
            at = Region("forward" if found.kind == "F" else "backward", -1)
            if at not in peaks or peaks[at].num_bytes < peak.num_bytes:
                peaks[at] = peak
            gradients = {GRADIENTS: gradients.get(GRADIENTS, 0) + found.left.get(GRADIENTS, 0)}
        left = sum(stage > 0 and kind == "I" for stage, kind, _ in self._queues[rank])
        for at, (rest, with_gradients, made_by) in family.between(place, trained).items():
            if at.phase == "update" and sizes.replicas > 1 and sum(rest.values()) < min(trained, BUCKET_BYTES):
                # The gradients of a bucket are added before the optimizer steps.
                rest = {COMMUNICATION: min(trained, BUCKET_BYTES)}
            rest = added(rest, {TEMPORARIES: left * family.left_messages * family.message_bytes})
            parts = added(added(base, rest), gradients if with_gradients else {})
            peaks[at] = Peak(sum(parts.values()), parts, made_by)
        return RankTrace(
            num_blocks=sum(self._blocks[stage] for stage in stages),
            peaks={
                at: replace(peak, categories={n: s for n, s in peak.categories.items() if s})
                for at, peak in peaks.items()
            },
            allocations=(),
            facts=self._facts(rank, stages, trained),
            **self._work(rank, place, trained)._asdict(),
        )

    def _sum(self, sizes: Any, stages: Sequence[int]) -> int:
        return sum(sizes.of(self._sizes.place_of(stage), self._blocks[stage]) for stage in stages)

    def _base(self, rank: int) -> dict[str, int]:
        sizes, family = self._sizes, self._whole
        stages = sizes.placement.stages_of(rank)
        last = len(sizes.cuts)
        buffers = sum((stage > 0) + (stage < last) for stage in stages)
        return {
            PARAMETERS: self._sum(family.weights, stages) - self._has_both_ends(rank) * family.tied.weights,
            OPTIMIZER: self._sum(family.optimizer, stages) - self._has_both_ends(rank) * family.tied.optimizer,
            COMMUNICATION: buffers * sizes.parts * family.message_bytes,
            BATCH: family.batch_bytes(sizes.parts, min(2, sizes.runs)),
        }

    def _replayed(self, rank: int, *, adds: bool) -> Replayed:
        sizes = self._sizes
        effect = functools.partial(self._effect, adds=adds)
        return replayed(self._queues[rank], effect, sizes.schedule, sizes.placement)

    def _facts(self, rank: int, stages: tuple[int, ...], trained: int) -> Any:
        sizes, family = self._sizes, self._whole
        facts = family.facts
        rows = sizes.rows * sizes.parts * sizes.runs * sizes.replicas
        # Those of the traced rank, in which the first stage and another one have six blocks.
        own = family.weights.before + 6 * family.weights.block, family.trained.before + 6 * family.trained.block
        base = self._base(rank)
        weights, optimizer = base[PARAMETERS], base[OPTIMIZER]
        name = f"rank {rank}"
        settings = {
            **facts.settings,
            "per_device_train_batch_size": sizes.rows * sizes.parts,
            "gradient_accumulation_steps": sizes.runs,
        }
        return replace(
            facts,
            mesh={"pipeline": sizes.ranks, "replicate": sizes.replicas, "shard": 1, "tensor": 1},
            parameters=facts.parameters * weights // own[0],
            trainable=facts.trainable * trained // max(1, own[1]),
            rows_per_update=rows,
            mean_rows_per_update=rows,
            num_pipeline_ranks=sizes.ranks,
            stages=stages,
            schedule=sizes.schedule,
            micro_batches=sizes.parts,
            schedule_runs=sizes.runs,
            stored=StoredState(model={name: weights}, weights={name: weights}, optimizer={name: optimizer}),
            settings=settings,
            parts=None,
        )

    def _work(self, rank: int, place: str, trained: int) -> PassWork:
        sizes = self._sizes
        operations: dict[Operation, float] = {}
        messages: dict[Message, float] = {}
        works = [(self._whole.update_work(place, trained), 1)]
        for (variant, blocks), times in self._counted(rank).items():
            works.append((self._family(variant.kind).work(variant, blocks), times))
        operations.update(self._copies_of_replicas(trained))
        for work, times in works:
            for name, count in work.operations.items():
                operations[name] = operations.get(name, 0) + count * times
            for message, count in work.messages.items():
                of_group = message._replace(group_size=sizes.ranks, stride=sizes.replicas)
                messages[of_group] = messages.get(of_group, 0) + count * times
        return PassWork(operations, {**messages, **self._sums_of_replicas(trained)})

    def _counted(self, rank: int) -> Counter[tuple[Variant, int]]:
        """Returns how often each pass of a rank is done in an update, by variant and number of blocks."""
        runs = self._sizes.runs
        found: Counter[tuple[Variant, int]] = Counter()
        for action in self._queues[rank]:
            blocks = self._blocks[action[0]]
            # The first of two runs stands for all but the last one, as in a trace.
            found[self._variant(action, adds=False)._replace(waits=False), blocks] += max(1, runs - 1)
            if runs > 1:
                found[self._variant(action, adds=True)._replace(waits=False), blocks] += 1
        return found

    def _sums_of_replicas(self, trained: int) -> dict[Message, float]:
        replicas = self._sizes.replicas
        if replicas == 1:
            return {}
        count = -(-trained // BUCKET_BYTES)
        return {Message("update", "c10d.allreduce_", trained // count, replicas): count}

    def _copies_of_replicas(self, trained: int) -> dict[Operation, float]:
        """Returns the work of copying gradients to the buckets in which replicas add them, and back."""
        count = 0 if self._sizes.replicas == 1 else -(-trained // BUCKET_BYTES)
        names = ("aten.cat", "aten.copy_")
        return {Operation("update", name, "float32", 0, 2 * trained // count): count for name in names if count}
