"""What a strategy keeps in the memory of the host while GPUs compute, and what it copies between the two.

Tensors of a trace are all on the CPU, so nothing in them tells the two memories apart. `Offload` takes a strategy, and
marks the allocations of a recording that a GPU would not have, and counts the copies, which a trace does not see: those
of what the strategy offloads, and of what the same strategy would offload with other settings.

Source:
    `FSDPParam.all_gather_inputs` and `foreach_reduce` of torch 2.13 (a unit's shard is copied to the device each time
    that it is gathered, the sum of its gradients back); `DeepSpeedZeroOptimizer` and `DeepSpeedZeroOptimizer_Stage3` of
    deepspeed 0.19.

Units:
    bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forgather.ml.planner.allocations import Allocation, storages
from forgather.ml.planner.engine_tensors import engine_host, engine_sizes
from forgather.ml.planner.operations import WorkCounter
from forgather.ml.planner.rank_recorder import BUCKETS, RankRecorder
from forgather.ml.planner.trace_facts import TraceFacts
from forgather.ml.strategy.deepspeed import DeepSpeedZero
from forgather.ml.strategy.deepspeed_config import offloads
from forgather.ml.strategy.fsdp_units import is_freed_after_forward
from forgather.planner.memory_plan import GRADIENTS, OPTIMIZER, PARAMETERS
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

    def placed(self, recorder: RankRecorder, local: nn.Module) -> tuple[Allocation, ...]:
        """Returns copies of all allocations so far; those that are in the memory of the host are marked.

        Args:
            recorder: the recorder, after the optimizer's step.
            local: the model.
        """
        found = recorder.until_now()
        if not self.parts:
            return found
        at = {id(one): index for index, one in enumerate(recorder.allocations)}

        def known(tensors: Iterable[Tensor]) -> list[Allocation]:
            return [found[at[id(one)]] for one in recorder.found(tensors)]

        if isinstance(self.strategy, DeepSpeedZero):
            host = engine_host(self.strategy)
            for one in known(host.gradients):
                one.category = GRADIENTS
            there = known([*host.gradients, *host.state]) if OPTIMIZER in self.parts else []
            there += known(host.weights) if PARAMETERS in self.parts else []
        else:
            for one in known(local.buffers()):
                one.category = BUFFERS
            there = known(local.parameters())
        for one in there:
            one.on_host = True
        for one in found if OPTIMIZER in self.parts else ():
            # Gradients, and all that the optimizer makes.
            one.on_host |= one.category in (GRADIENTS, OPTIMIZER) or (
                one.region.phase == "update" and one.category != BUCKETS
            )
        return found

    def work(self, counted: WorkCounter, accumulation: float) -> dict[str, Any]:
        """Returns the work of a step: the optimizer's is one of the host, and copies between host and device are added.

        Args:
            counted: the work of the step as it was counted.
            accumulation: the number of micro-batches.

        Returns:
            The values of `operations`, `messages` and `repeated` of a `RankTrace`.
        """
        operations, messages = dict(counted.operations), dict(counted.messages)
        repeated = {key: count for key, count in counted.repeated.items() if count}
        if OPTIMIZER in self.parts:
            for key in [key for key in operations if key.phase == "update"]:
                operations[key._replace(phase=ON_HOST)] = operations.pop(key)
        for copied in self._copies() if self.parts else ():
            number = copied.each * accumulation + copied.later * (accumulation - 1) + copied.once
            if copied.work.num_bytes and number:
                counts: Any = operations if isinstance(copied.work, Operation) else messages
                counts[copied.work] = counts.get(copied.work, 0) + number
                if accumulation > 1:
                    repeated[copied.work] = repeated.get(copied.work, 0) + copied.each + copied.later
        return {"operations": operations, "messages": messages, "repeated": repeated}

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

    def facts(self, facts: TraceFacts) -> TraceFacts:
        """Returns the facts of a run that offloads: with buffers for what is on its way, and a note."""
        if not self.parts:
            return facts
        note = (
            f"{', '.join(self.parts)} are in the memory of the host, and no row of a device counts them; time on the "
            "host and on its link is a wide range, and was not measured"
        )
        untraced = {**facts.untraced, **self._on_the_way()}
        return replace(facts, untraced=untraced, notes=(*facts.notes, note))

    # At stage 2, an engine that offloads nothing holds more while it sums the gradients of later micro-batches. A plan
    # from its trace is up to the gradients of a rank above that of an engine that offloads.

    def _on_the_way(self) -> dict[str, int]:
        """Returns the memory of a device through which weights and gradients pass."""
        if not isinstance(self.strategy, DeepSpeedZero):
            # A shard of weights that are gathered, and one of gradients.
            return {ON_THE_WAY: 2 * max((unit.num_bytes for unit in _units(self.strategy)), default=0)}
        if self.parts == offloaded_parts(self.strategy):
            return {}
        # An engine that offloads has a buffer for the gradient of any weight; at stage 3, for the norm of a part of it.
        trained: list[Any] = [one for one in self.strategy.model.parameters() if one.requires_grad]
        sizes = (
            [one.ds_tensor.numel() * torch.float64.itemsize for one in trained]
            if self.strategy.config.stage == _DIVIDED
            else [one.numel() * one.element_size() for one in trained]
        )
        return {ON_THE_WAY: max(sizes, default=0)}


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
        gathers = 2 if is_freed_after_forward(module) else 1
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
