"""What pipeline stages hold and do, for any number of blocks and micro-batches, from the traces of two ranks.

`StageFamily` gives the effect and the work of each pass of a stage with any number of blocks, and the state that it
holds. `trace_family` makes one.

Units:
    bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from forgather.ml.planner.allocations import Allocation, Region
from forgather.ml.planner.family_trace import FAMILY_PARTS, TracedRank, trace_ranks
from forgather.ml.planner.masked_parts import masked_parts
from forgather.ml.planner.pass_shape import DEPTH, IrregularPassError, PassShape, shapes_of
from forgather.ml.planner.peaks import Peak
from forgather.ml.planner.rank_recorder import BATCH, COMMUNICATION, TEMPORARIES
from forgather.ml.planner.rank_trace import MakeTrainer
from forgather.ml.planner.stage_parts import StageParts
from forgather.ml.planner.stage_passes import StagePass
from forgather.ml.planner.stage_variants import (
    ALONE,
    FIRST,
    LAST,
    MIDDLE,
    Adds,
    Effect,
    PartSizes,
    PassWork,
    TiedSizes,
    Turn,
    Variant,
)
from forgather.planner.memory_plan import GRADIENTS, OPTIMIZER, PARAMETERS
from forgather.planner.work import Operation

_PLACES = {0: FIRST, 1: ALONE, 2: MIDDLE, 3: LAST}
_BLOCKS = {0: {0: range(0, 3), 2: range(3, 6)}, 1: {1: range(0, 1), 3: range(1, 4)}}
_STATE = (PARAMETERS, OPTIMIZER, COMMUNICATION, BATCH, GRADIENTS)


class StageFamily:
    """The stages of pipelines with the same settings besides their schedule and their sizes.

    Args:
        traced: the traces of both ranks, with their passes.
        masks: a function that returns which micro-batches of some runs are masked, see `masked_parts`.

    Raises:
        IrregularPassError: if stages with other numbers of blocks do not follow from the traces.
    """

    def __init__(
        self, traced: Sequence[TracedRank], masks: Callable[[int, int, int], tuple[tuple[bool, ...], ...]]
    ) -> None:
        self._traced = traced
        self.masks = functools.lru_cache(masks)
        self._own_masks = masks(self.rows, FAMILY_PARTS, 1)[0]
        self._shapes: dict[Variant, PassShape] = {}
        self._work: dict[Variant, PassWork] = {}
        for rank, one in enumerate(traced):
            variants = {Variant(_PLACES[item.stage], item.kind, Turn(item.micro_batch)): item for item in one.passes}
            for waits, adds in itertools.product((False, True), Adds):
                shapes = shapes_of(
                    one.trace.allocations, one.passes, _BLOCKS[rank], output_waits=waits, adds=self._added[adds]
                )
                for variant, noted in variants.items():
                    own = variant._replace(waits=waits, adds=adds)
                    self._shapes[own] = shapes[noted.stage, noted.kind, noted.micro_batch]
            self._work.update(_work_of(one, variants))
        assert self.left_messages >= 0  # noqa: S101 - raises if the ranks hold anything else

    @property
    def facts(self) -> Any:
        """The facts of the trace of the first rank."""
        return self._traced[0].trace.facts

    @property
    def rows(self) -> int:
        """The rows of a micro-batch."""
        return int(self.facts.settings["per_device_train_batch_size"]) // FAMILY_PARTS

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its passes."""
        return tuple(kind for kind in "FBIW" if Variant(MIDDLE, kind, Turn.LATER) in self._shapes)

    def turn(self, micro_batch: int, masks: Sequence[bool]) -> Turn:
        """Returns which of the traced micro-batches does what a micro-batch of another run does.

        Where none of them has the same mask, it is the one that needs more memory, if there is such a one.

        Args:
            micro_batch: its number.
            masks: see `masks`; for all micro-batches of the run.
        """
        if micro_batch == 0:
            return Turn.FIRST
        later = (Turn.LATER, Turn.LAST)
        alike = [one for one in later if self._own_masks[one.value] == masks[micro_batch]]
        return alike[0] if alike else Turn.LAST

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the whole model."""
        whole = self._traced[0].trace.whole
        assert whole is not None, "the model was shortened"  # noqa: S101
        return whole

    @property
    def parts(self) -> StageParts:
        """The parts of the shortened model."""
        found: StageParts = self.facts.parts
        return found

    @lru_cache(maxsize=4096)  # noqa: B019 - a family lives as long as a search
    def effect(self, variant: Variant, num_blocks: int) -> Effect:
        """Returns the effect of a pass.

        Args:
            variant: the pass.
            num_blocks: the number of blocks of the stage.
        """
        alone = self._shapes[variant._replace(place=ALONE)]
        shape = alone if variant.place == MIDDLE and num_blocks == 1 else self._shapes[variant]
        return Effect(shape.of(num_blocks, alone), shape.passed_on)

    @lru_cache(maxsize=4096)  # noqa: B019 - a family lives as long as a search
    def work(self, variant: Variant, num_blocks: int) -> PassWork:
        """Returns the work of a pass. See `effect`."""
        own, few, many = (self._work_of_one(variant._replace(place=place)) for place in (variant.place, ALONE, MIDDLE))
        if variant.place == FIRST and variant.kind == "I":
            # Inputs of the first stage have no gradients, and its pass of weights is a whole backward pass.
            return own
        if variant.place == FIRST and variant.kind == "W":
            few, many = (self._whole_backward(variant._replace(place=place)) for place in (ALONE, MIDDLE))
        more = (num_blocks - DEPTH) / (DEPTH - 1)

        def drawn(index: int) -> dict[Any, float]:
            found: dict[Any, float] = dict(own[index])
            for sign, other in ((1, many[index]), (-1, few[index])):
                for name, count in other.items():
                    found[name] = found.get(name, 0) + sign * more * count
            return {name: count for name, count in found.items() if count}

        return PassWork(drawn(0), drawn(1))

    def _whole_backward(self, variant: Variant) -> PassWork:
        """Returns the work of a backward pass as one, from its two parts, which both recompute activations."""
        inputs, weights = self._work_of_one(variant._replace(kind="I")), self._work_of_one(variant)
        found = dict(inputs.operations)
        for name, count in weights.operations.items():
            if name.phase != "recompute":
                # A pass of weights adds to the gradients outside of autograd, where a whole one does it inside.
                own = name._replace(phase="backward")
                found[own] = found.get(own, 0) + count
        return PassWork(found, {})

    def _work_of_one(self, variant: Variant) -> PassWork:
        plain = variant._replace(waits=False, adds=Adds.NOTHING)
        found = self._work[plain]
        if variant.adds is not Adds.ALL or variant.turn is not Turn.FIRST:
            return found
        # What a later pass adds to gradients, this one only makes.
        sums = {
            name: count - found.operations.get(name, 0)
            for name, count in self._work[plain._replace(turn=Turn.LATER)].operations.items()
            if name.name == "aten.add_" and count > found.operations.get(name, 0)
        }
        return PassWork({**found.operations, **_sum(found.operations, sums)}, found.messages)

    @cached_property
    def weights(self) -> PartSizes:
        """The bytes of the weights and buffers of each part."""
        return self._parts_of(PARAMETERS, round(self.parts.weights.blocks[1]))

    @cached_property
    def optimizer(self) -> PartSizes:
        """The bytes of the optimizer state of each part."""
        name = f"{self.parts.plan.blocks.block_name(1)}."
        stored = self.facts.stored.optimizer
        own = sum(size for key, size in stored.items() if key.startswith(name))
        scalars = self._traced[0].held(OPTIMIZER) - sum(stored.values())
        number = sum(key.startswith(name) for key in stored)
        return self._parts_of(OPTIMIZER, own + scalars * number // max(1, len(stored)))

    @cached_property
    def tied(self) -> TiedSizes:
        """The bytes of the weights that both the first and the last stage have, which a rank with both has once."""
        first, last = (one.trace.facts.stored for one in self._traced)
        names = first.weights.keys() & last.weights.keys()
        return TiedSizes(
            weights=sum(first.weights[name] for name in names),
            trained=sum(first.weights[name] for name in names if name in first.optimizer),
            optimizer=sum(first.optimizer.get(name, 0) for name in names),
            sizes=frozenset(first.weights[name] for name in names),
        )

    @cached_property
    def _added(self) -> dict[Adds, Callable[[Allocation], bool]]:
        return {
            Adds.NOTHING: lambda _: False,
            # A gradient has no name in a recording, and the weights of blocks have other sizes.
            Adds.TIED: lambda item: item.num_bytes in self.tied.sizes,
            Adds.ALL: lambda _: True,
        }

    @cached_property
    def trained(self) -> PartSizes:
        """The bytes of the trained weights of each part."""
        costs = self.parts.trained
        return PartSizes(before=round(costs.before), block=round(costs.blocks[1]), after=round(costs.after))

    @property
    def message_bytes(self) -> int:
        """The bytes of what a stage passes on for one micro-batch."""
        return sum(self._shapes[Variant(MIDDLE, "F", Turn.LATER)].passed_on.values())

    def batch_bytes(self, parts: int, windows: int) -> int:
        """Returns the bytes of the batches that wait on a rank.

        Args:
            parts: the number of micro-batches of a run of the schedule.
            windows: the number of runs whose batches are there.
        """
        return self._traced[0].held(BATCH) * parts // FAMILY_PARTS * windows

    def prologue(self, place: str, parts: int) -> dict[str, int]:
        """Returns what a run of the schedule holds before its first pass, by category."""
        found = self._of(place).prologue
        return {name: size * parts // FAMILY_PARTS for name, size in found.items()}

    def between(self, place: str, trained: int) -> dict[Region, tuple[dict[str, int], bool, str]]:
        """Returns what the optimizer step, evaluations and answers need besides the state, by region.

        Args:
            place: `FIRST` or `LAST` of a rank that has this stage, `MIDDLE` of any other.
            trained: the bytes of the trained weights of the rank.

        Returns:
            The bytes by category, whether gradients are there, and what made the peak.
        """
        found = {}
        for at, peak in self._of(place).trace.peaks.items():
            if at.phase in ("forward", "backward", "host"):
                continue
            rest = self._besides_state(self._of(place), peak)
            if at.phase == "update" and self._updates_at_once:
                own = self._trained_of(self._of(place))
                rest = {name: size * trained // own for name, size in rest.items()}
            found[at] = (rest, GRADIENTS in peak.categories, peak.made_by)
        return found

    def update_work(self, place: str, trained: int) -> PassWork:
        """Returns the work of an optimizer step. For the arguments see `between`."""
        one = self._of(place)
        share = trained / self._trained_of(one)
        operations: dict[Operation, float] = {}
        for name, count in one.trace.operations.items():
            if name.phase == "update" and name.name.startswith(("aten._foreach", "aten._fused")):
                operations[name._replace(num_bytes=round(name.num_bytes * share), flops=round(name.flops * share))] = (
                    count
                )
            elif name.phase == "update":
                operations[name] = count * share
            elif name.phase == "evaluation":
                operations[name] = count
        messages = {name: count for name, count in one.trace.messages.items() if name.phase == "update"}
        return PassWork(operations, messages)

    @property
    def _updates_at_once(self) -> bool:
        """Whether the optimizer step needs memory for all weights at once, and not for the largest one."""
        shares = []
        for one in self._traced:
            peaks = [peak for at, peak in one.trace.peaks.items() if at.phase == "update"]
            most = max(sum(self._besides_state(one, peak).values()) for peak in peaks)
            shares.append(most / self._trained_of(one))
        return abs(shares[0] - shares[1]) < 0.02 * max(shares)

    def _besides_state(self, one: TracedRank, peak: Peak) -> dict[str, int]:
        """Returns what a peak has besides the state and the messages that the last run has left, by category."""
        rest = {name: size for name, size in peak.categories.items() if name not in _STATE}
        later_stages = 1 if one is self._traced[0] else 2
        left = self.left_messages * self.message_bytes * FAMILY_PARTS * later_stages
        return {**rest, TEMPORARIES: max(0, rest.get(TEMPORARIES, 0) - left)}

    def _trained_of(self, one: TracedRank) -> int:
        ends = self.trained.before if one is self._traced[0] else self.trained.after
        blocks = sum(map(len, _BLOCKS[self._traced.index(one)].values()))
        return max(1, ends + blocks * self.trained.block)

    def _of(self, place: str) -> TracedRank:
        return self._traced[place == LAST]

    def _parts_of(self, category: str, block: int) -> PartSizes:
        ends = (
            one.held(category) - block * sum(map(len, _BLOCKS[rank].values())) for rank, one in enumerate(self._traced)
        )
        before, after = ends
        return PartSizes(before=before, block=block, after=after)

    @cached_property
    def left_messages(self) -> int:
        """How many messages a pass of kind I of a stage after the first one leaves until the next run begins.

        Raises:
            IrregularPassError: if the traced ranks hold other messages besides the buffers of what stages receive.
        """
        own = FAMILY_PARTS * self.message_bytes
        first, second = (one.held(COMMUNICATION) - 3 * own for one in self._traced)
        # One of two stages of the first rank comes after another one, both of the second one do.
        if first % own or second != 2 * first:
            raise IrregularPassError("its ranks hold more than the messages of their stages")
        return first // own


def _sum(one: Mapping[Operation, float], other: Mapping[Operation, float]) -> dict[Operation, float]:
    return {name: one.get(name, 0) + count for name, count in other.items()}


def trace_family(make_trainer: MakeTrainer, *, device_type: str) -> StageFamily:
    """Returns the stages of a pipeline.

    Args:
        make_trainer: see `trace_ranks`.
        device_type: the kind of device, "cpu" or "cuda".

    Raises:
        IrregularPassError: if stages with other numbers of blocks do not follow from the traces, as those of a model
            whose blocks differ.
    """
    traced, trainer = trace_ranks(make_trainer, device_type=device_type)
    return StageFamily(traced, functools.partial(masked_parts, trainer))


def _work_of(one: TracedRank, variants: Mapping[Variant, StagePass]) -> dict[Variant, PassWork]:
    ordered = sorted(one.passes, key=lambda noted: noted.begins)
    following: dict[int, StagePass] = {id(noted): later for noted, later in zip(ordered, ordered[1:], strict=False)}

    def difference(noted: StagePass, kind: str, whole: Mapping[Any, float]) -> dict[Any, float]:
        later = following.get(id(noted))
        until = whole if later is None else getattr(later, kind)
        since = getattr(noted, kind)
        return {name: count - since.get(name, 0) for name, count in until.items() if count != since.get(name, 0)}

    def passes_only(whole: Mapping[Any, float]) -> dict[Any, float]:
        return {name: count for name, count in whole.items() if name.phase not in ("update", "evaluation")}

    operations, messages = passes_only(one.trace.operations), passes_only(one.trace.messages)
    return {
        key: PassWork(difference(noted, "operations", operations), difference(noted, "messages", messages))
        for key, noted in variants.items()
    }
