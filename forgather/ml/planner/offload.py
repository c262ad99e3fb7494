"""What a strategy keeps in the memory of the host while GPUs compute, and what it copies between the two.

Tensors of a trace are all on the CPU, so nothing in them tells the two memories apart. `Offload` takes a strategy, and
marks the allocations of a recording that a GPU would not have; it counts the copies, which a trace does not see.

Source:
    `FSDPParam.all_gather_inputs` and `foreach_reduce` of torch 2.13 (a unit's shard is copied to the device each time
    that it is gathered, the sum of its gradients back); `DeepSpeedZeroOptimizer` and `DeepSpeedZeroOptimizer_Stage3` of
    deepspeed 0.19.

Units:
    bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forgather.ml.planner.allocations import Allocation, storages
from forgather.ml.planner.engine_tensors import engine_host, engine_sizes
from forgather.ml.planner.operations import WorkCounter
from forgather.ml.planner.rank_recorder import BUCKETS, GRADIENTS, OPTIMIZER, PARAMETERS, RankRecorder
from forgather.ml.strategy.deepspeed import DeepSpeedZero
from forgather.ml.strategy.deepspeed_config import offloads
from forgather.planner.work import ON_HOST, TO_DEVICE, TO_HOST, Message, Operation

BUFFERS, ON_THE_WAY = "buffers", "copied shards"
"""What stays on the device of an offloaded model: its buffers, and shards on their way to or from the host."""


class _Copies(NamedTuple):
    """Work that a trace does not see: how often in each micro-batch, in each one but the first, and in each step."""

    work: Message | Operation
    each: int = 0
    later: int = 0
    once: int = 0


@dataclass(frozen=True)
class Offload:
    """What a strategy keeps in the memory of the host.

    Args:
        strategy: the strategy of the run.
        parts: the uses of memory that are there, of weights, gradients and optimizer state; empty if there are none.
    """

    strategy: Any
    parts: tuple[str, ...]

    @classmethod
    def of(cls, strategy: Any, device_type: str) -> Offload:
        """Returns the offload of a run; a run on processors has no memory but that of the host.

        Args:
            strategy: the strategy of the run.
            device_type: the kind of device that is planned for, "cpu" or "cuda".
        """
        return cls(strategy, () if device_type == "cpu" else offloaded_parts(strategy))

    def hold(self, recorder: RankRecorder, local: nn.Module) -> None:
        """Marks what exists before a step, and is in the memory of the host.

        Args:
            recorder: the recorder, which has all these tensors.
            local: the model.
        """
        if not self.parts:
            return
        if isinstance(self.strategy, DeepSpeedZero):
            host = engine_host(self.strategy)
            if PARAMETERS in self.parts:
                recorder.move_to_host(host.weights)
            if OPTIMIZER in self.parts:
                recorder.hold(host.gradients, GRADIENTS)
                recorder.move_to_host([*host.gradients, *host.state])
        else:
            recorder.move_to_host(local.parameters())
            recorder.hold(local.buffers(), BUFFERS)

    def place(self, allocations: Iterable[Allocation]) -> None:
        """Marks what a step makes in the memory of the host: gradients, and all that the optimizer makes there.

        Args:
            allocations: the allocations of a recording, with their categories.
        """
        if OPTIMIZER in self.parts:
            for one in allocations:
                one.on_host |= one.category in (GRADIENTS, OPTIMIZER) or (
                    one.region.phase == "update" and one.category != BUCKETS
                )

    def count(self, work: WorkCounter, accumulation: float) -> None:
        """Counts the copies between host and device in a step, and makes the optimizer's work one of the host.

        Args:
            work: the work of the step.
            accumulation: the number of micro-batches.
        """
        if OPTIMIZER in self.parts:
            for key in [key for key in work.operations if key.phase == "update"]:
                work.operations[key._replace(phase=ON_HOST)] += work.operations.pop(key)
        for copied in self._copies() if self.parts else ():
            number = copied.each * accumulation + copied.later * (accumulation - 1) + copied.once
            if not copied.work.num_bytes or not number:
                continue
            counts: Any = work.operations if isinstance(copied.work, Operation) else work.messages
            counts[copied.work] += number
            if accumulation > 1:
                work.repeated[copied.work] += copied.each + copied.later

    def _copies(self) -> Iterator[_Copies]:
        if not isinstance(self.strategy, DeepSpeedZero):
            yield from _copies_of_units(self.strategy)
            return
        sizes = engine_sizes(self.strategy)
        if OPTIMIZER in self.parts:
            # At stage 3, gradients of each micro-batch come back; else those of earlier ones, to be added there.
            again = {"each": 1} if self.strategy.config.stage == _DIVIDED else {"later": 1}
            yield _Copies(Message("backward", TO_HOST, sizes.gradients, 1), once=1, **again)
            yield _Copies(Message("backward", TO_DEVICE, sizes.gradients, 1), **again)
        if PARAMETERS in self.parts:
            for phase in ("forward", "backward"):
                yield _Copies(Message(phase, TO_DEVICE, sizes.gathered, 1), each=1)
        if len(self.parts) < len(_PARTS):
            way = TO_HOST if PARAMETERS in self.parts else TO_DEVICE
            yield _Copies(Message("update", way, sizes.updated, 1), once=1)

    def untraced(self) -> Mapping[str, int]:
        """Returns the memory of shards that are copied: one of weights that are gathered, one of gradients."""
        if not self.parts or isinstance(self.strategy, DeepSpeedZero):
            return {}
        return {ON_THE_WAY: 2 * max((unit.num_bytes for unit in _units(self.strategy)), default=0)}

    def notes(self) -> Iterator[str]:
        """Yields a sentence that says which rows are memory of the host, if any are."""
        if self.parts:
            yield (
                f"{', '.join(self.parts)} are in the memory of the host, and no row of a device counts them; time on "
                "the host and on its link is a wide range, and was not measured"
            )


_PARTS = (PARAMETERS, GRADIENTS, OPTIMIZER)
_DIVIDED = 3  # the stage of DeepSpeed at which weights are divided, too


class _Unit(NamedTuple):
    num_bytes: int
    trained_bytes: int
    gathers: int


def _units(strategy: Any) -> list[_Unit]:
    """Returns the shards of the units of FSDP2, and how often a micro-batch gathers each."""
    modules = [module for module in strategy.model.modules() if isinstance(module, FSDPModule)]
    seen: set[int] = set()
    found = []
    # Inner modules first: a weight belongs to the innermost unit around it.
    for module in reversed(modules):
        own = [one for one in module.parameters() if id(one) not in seen]  # type: ignore[attr-defined]
        seen.update(map(id, own))
        is_kept = module is modules[0] and len(modules) > 1
        gathers = 2 if strategy._sharding.reshard_after_forward and not is_kept else 1
        found.append(_Unit(_bytes(own), _bytes(one for one in own if one.requires_grad), gathers))
    return found


def _copies_of_units(strategy: Any) -> Iterator[_Copies]:
    for unit in _units(strategy):
        for phase in ("forward", "backward")[: unit.gathers]:
            yield _Copies(Message(phase, TO_DEVICE, unit.num_bytes, 1), each=1)
        if unit.trained_bytes:
            yield _Copies(Message("backward", TO_HOST, unit.trained_bytes, 1), each=1)
            # The host adds the gradients of micro-batches: it reads two and writes one.
            yield _Copies(Operation(ON_HOST, "aten.add_", "float32", 0, 3 * unit.trained_bytes), later=1)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for tensor in tensors for storage in storages(tensor))


def offloaded_parts(strategy: Any) -> tuple[str, ...]:
    """Returns the uses of memory that a strategy keeps in the memory of the host.

    Args:
        strategy: the strategy of the run.
    """
    if isinstance(strategy, DeepSpeedZero):
        state = (GRADIENTS, OPTIMIZER) if offloads(strategy.config.config, "optimizer") else ()
        weights = (PARAMETERS,) if offloads(strategy.config.config, "param") else ()
        return (*weights, *state)
    sharding = getattr(strategy, "_sharding", None)
    return _PARTS if sharding is not None and sharding.cpu_offload else ()
