"""The time of an optimizer step as a range: a roofline for each operator, rings for collectives, and the bubble.

Takes a `RunWork`, a `Hardware` and an `Efficiency`; gives a `StepTime`. The lower bound assumes the better efficiency
and that all communication that can overlap computation does. The upper bound assumes the worse one, and no overlap.

Units:
    seconds, floating-point operations, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forgather.errors import PlanError
from forgather.planner.efficiency import ON_PROCESSORS, Efficiency, Range
from forgather.planner.hardware import LINKS, Hardware
from forgather.planner.work import ON_HOST, TO_DEVICE, TO_HOST, Message, Operation, RankWork, RunWork

MATRIX, ATTENTION, ELEMENTWISE, RECOMPUTATION = "matrix products", "attention", "elementwise", "recomputation"
OPTIMIZER, COMMUNICATION, BUBBLE = "optimizer", "communication", "bubble"
HOST_LINK = "copies to and from the host"
KINDS = (MATRIX, ATTENTION, ELEMENTWISE, RECOMPUTATION, OPTIMIZER, COMMUNICATION, HOST_LINK, BUBBLE)
_RATES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32", "int8": "int8"}
HOST_MEMORY = Range(51.2e9, 921.6e9)
"""The memory bandwidth of a machine with GPUs, which its processes share; that of the own machine is unknown. From two
channels of DDR4-3200 (25.6 GB/s each, JESD79-4) to two sockets of the fastest processor of the table of hardware."""
HOST_LINKS = Range(16e9, 64e9)
"""The rate of PCIe 3.0 to 5.0 with 16 lanes, for a device of which no link to the host is known."""

Simulate = Callable[[str, Sequence[tuple[float, float]], int, int, float], float]
"""Returns the seconds of one run of a pipeline's schedule from its name, the seconds of the forward and the backward
pass of one micro-batch in each stage, the numbers of micro-batches and of stages on a rank, and the seconds of a
transfer."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step, and what follows from it.

    Args:
        seconds: the time of an optimizer step.
        rows: the time of each kind of work on the slowest rank; communication as far as nothing hides it.
        model_flops: the FLOPs of a step on all devices, see `RunWork.model_flops`.
        document_flops: those of them that grow with the length of documents, see `RunWork.document_flops`.
        document_length: the length for which they were counted, see `RunWork.document_length`.
        executed_flops: the FLOPs that all devices execute, see `RunWork.executed_flops`.
        mfu: the model FLOPs utilization, as a share of `peak_flops`.
        peak_flops: the dense peak rate of one device for the dtype of most operations.
        tokens_per_second: the tokens of all devices a second; rows if rows have no tokens.
        assumptions: what was assumed, one sentence each.
    """

    seconds: Range
    rows: Mapping[str, Range]
    model_flops: int
    executed_flops: int
    mfu: Range
    peak_flops: float
    tokens_per_second: Range
    assumptions: tuple[str, ...] = field(default=())
    document_flops: int = 0
    document_length: float | None = None

    def as_data(self) -> dict[str, Any]:
        """Returns the values as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _RankTime:
    """The times of one rank: of each kind of computation, of passes, and of messages."""

    kinds: Mapping[str, Range]
    forward: Range
    backward: Range
    hideable: Range
    blocking: Range
    transfer: Range
    copies: Range
    blocking_copies: Range

    @property
    def passes(self) -> Range:
        return self.forward + self.backward

    @property
    def update(self) -> Range:
        return self.kinds[OPTIMIZER]


def step_time(work: RunWork, hardware: Hardware, efficiency: Efficiency, *, simulate: Simulate) -> StepTime:
    """Returns the time of a step.

    Args:
        work: the work of all ranks.
        hardware: the device of each rank.
        efficiency: how much of their peak rates devices reach.
        simulate: the simulation of a pipeline's schedule.

    Raises:
        PlanError: FG990 if the facts of the hardware lack a rate that is needed.
    """
    check_rates(hardware)
    times = [_rank_time(one, work, hardware, efficiency) for one in work.ranks]
    slowest = max(times, key=lambda one: one.passes.high + one.update.high)
    bubble = Range() if work.schedule is None else _bubble(times, work, simulate, slowest)
    # Messages of the sharded strategies run alongside computation, as far as there is any.
    exposed = Range(max(0.0, slowest.hideable.low - slowest.passes.low), slowest.hideable.high) + slowest.blocking
    # So do copies to and from the host, over another link.
    hidden = max(slowest.passes.low, slowest.hideable.low)
    copies = Range(max(0.0, slowest.copies.low - hidden), slowest.copies.high) + slowest.blocking_copies
    rows = {**slowest.kinds, COMMUNICATION: exposed, HOST_LINK: copies, BUBBLE: bubble}
    seconds = sum(rows.values(), Range())
    dtype, peak = _main_rate(work, hardware)
    tokens = work.rows_per_update * (work.tokens_per_row or 1)
    return StepTime(
        seconds=seconds,
        rows={kind: rows[kind] for kind in KINDS if rows[kind].high > 0},
        model_flops=work.model_flops,
        executed_flops=work.executed_flops,
        mfu=seconds.under(work.model_flops / (peak * work.world_size)),
        peak_flops=peak,
        tokens_per_second=seconds.under(tokens),
        assumptions=_assumptions(work, hardware, efficiency, dtype),
        document_flops=work.document_flops,
        document_length=work.document_length,
    )


def check_rates(hardware: Hardware) -> None:
    """Raises an error if the facts of a device lack a rate without which no time can be planned.

    Args:
        hardware: the device.

    Raises:
        PlanError: FG990 if a rate is missing.
    """
    if not hardware.gives_times:
        missing = "peak rate of operations" if hardware.memory_bytes_per_second else "memory bandwidth"
        raise PlanError(
            f"the facts of {hardware.title} have no {missing}, so that the time of a step cannot be planned",
            code="FG990",
            hint="give a hardware file with dense_tflops and memory_gb_per_second",
        )


def _rank_time(one: RankWork, work: RunWork, hardware: Hardware, efficiency: Efficiency) -> _RankTime:
    kinds = dict.fromkeys(KINDS[:5], Range())
    passes = {"forward": Range(), "backward": Range()}
    for operation, count in one.operations.items():
        if operation.phase == "evaluation":
            continue
        if operation.phase == ON_HOST:
            kinds[OPTIMIZER] += _host_seconds(operation, work.local_world_size).times(count)
            continue
        seconds = operation_seconds(operation, hardware, efficiency).times(count)
        kinds[_kind(operation)] += seconds
        if operation.phase != "update":
            passes["forward" if operation.phase == "forward" else "backward"] += seconds
    hideable = blocking = transfer = copies = blocking_copies = Range()
    for message, count in one.messages.items():
        if message.phase == "evaluation":
            continue
        if message.name in (TO_DEVICE, TO_HOST):
            seconds = _copy_seconds(message, hardware, efficiency).times(count)
            if message.phase == "update":
                blocking_copies += seconds
            else:
                copies += seconds
            continue
        seconds = message_seconds(message, hardware, efficiency, local_world_size=work.local_world_size)
        if message.name.startswith(("c10d.send", "c10d.recv")):
            # The simulation of the schedule waits for it.
            transfer = Range(max(transfer.low, seconds.low), max(transfer.high, seconds.high))
        elif message.name.startswith("c10d.") and message.phase != "update" and _hides_messages(hardware):
            hideable += seconds.times(count)
        else:
            blocking += seconds.times(count)
    return _RankTime(
        kinds=kinds,
        **passes,
        hideable=hideable,
        blocking=blocking,
        transfer=transfer,
        copies=copies,
        blocking_copies=blocking_copies,
    )


def _host_seconds(operation: Operation, processes: int) -> Range:
    """Returns the time of an operator on the host, whose processes all compute at the same time."""
    share = ON_PROCESSORS.memory
    moving = Range(HOST_MEMORY.low * share.low, HOST_MEMORY.high * share.high).under(processes * operation.num_bytes)
    launching = ON_PROCESSORS.call_seconds
    return Range(max(moving.low, launching.low), max(moving.high, launching.high))


def _copy_seconds(message: Message, hardware: Hardware, efficiency: Efficiency) -> Range:
    known = hardware.links.get("pcie")
    link = HOST_LINKS if known is None else Range(known, known)
    share = efficiency.communication
    return Range(link.low * share.low, link.high * share.high).under(message.num_bytes) + efficiency.call_seconds


def _hides_messages(hardware: Hardware) -> bool:
    """Returns whether messages can pass while a device computes: the cores of a processor do both."""
    return hardware.kind != "cpu"


def _kind(operation: Operation) -> str:
    if operation.phase == "update":
        return OPTIMIZER
    if operation.phase == "recompute":
        return RECOMPUTATION
    if operation.is_attention:
        return ATTENTION
    return MATRIX if operation.flops else ELEMENTWISE


def operation_seconds(operation: Operation, hardware: Hardware, efficiency: Efficiency) -> Range:
    """Returns the time of one call: the longest of computing, moving bytes, and launching.

    Args:
        operation: the operator.
        hardware: the device, whose rates are known.
        efficiency: how much of its peak rates it reaches.
    """
    moving = efficiency.memory.under(operation.num_bytes / (hardware.memory_bytes_per_second or 1.0))
    computing = efficiency.compute.under(operation.flops / _rate(operation.dtype, hardware))
    launching = efficiency.call_seconds
    return Range(max(moving.low, computing.low, launching.low), max(moving.high, computing.high, launching.high))


def _rate(dtype: str, hardware: Hardware) -> float:
    key = "fp8" if dtype.startswith("float8") else _RATES.get(dtype, "fp32")
    known = hardware.peak_flops
    # Devices without a type compute it with the rate of the widest one that they have.
    return known.get(key) or known.get("fp32") or min(known.values())


def _main_rate(work: RunWork, hardware: Hardware) -> tuple[str, float]:
    sums: dict[str, float] = {}
    for one in work.ranks:
        for operation, count in one.operations.items():
            sums[operation.dtype] = sums.get(operation.dtype, 0) + operation.flops * count
    dtype = max(sums, key=lambda name: sums[name])
    return dtype, _rate(dtype, hardware)


def message_seconds(message: Message, hardware: Hardware, efficiency: Efficiency, *, local_world_size: int) -> Range:
    """Returns the time of one message alone: the bytes that pass each link of a ring, and the latency of its steps.

    A ring of n ranks passes (n-1)/n of the bytes for an all-gather or a reduce-scatter, and twice that for an
    all-reduce. The lower bound of the latency is that of a tree, log2(n) steps; the upper one that of a ring, n-1.

    Args:
        message: the message.
        hardware: the device of each rank.
        efficiency: how much of the links is used.
        local_world_size: the number of processes on one machine.
    """
    size, name = message.group_size, message.name
    if size < 2:
        return Range()
    inside = min(size, max(1, local_world_size // message.stride))
    link = next(
        (hardware.links[key] for key in LINKS if key in hardware.links), hardware.memory_bytes_per_second or 1.0
    )
    latency = efficiency.message_seconds
    if inside < size:
        adapters = 1.0 / local_world_size * inside if hardware.network_is_shared else inside
        link = min(link, hardware.links.get("network", link) * adapters)
        latency = efficiency.network_seconds
    if any(part in name for part in ("send", "recv", "broadcast", "scatter_")) and "reduce_scatter" not in name:
        share, rounds = 1.0, 1
    else:
        rounds = 2 if "allreduce" in name or "all_reduce" in name else 1
        share = rounds * (size - 1) / size
    steps = Range(math.ceil(math.log2(size)), size - 1) if "send" not in name and "recv" not in name else Range(1, 1)
    waiting = Range(steps.low * latency.low, steps.high * latency.high).times(rounds)
    return efficiency.communication.under(share * message.num_bytes / link) + waiting


def _bubble(times: Sequence[_RankTime], work: RunWork, simulate: Simulate, slowest: _RankTime) -> Range:
    """Returns the time in which the slowest rank of a pipeline waits."""
    per_rank = len(work.ranks[0].stages)
    passed = work.micro_batches * work.schedule_runs * per_rank
    stages = {stage: one for rank, one in zip(work.ranks, times, strict=True) for stage in rank.stages}

    def step(bound: str) -> float:
        seconds = [
            (getattr(stages[stage].forward, bound) / passed, getattr(stages[stage].backward, bound) / passed)
            for stage in sorted(stages)
        ]
        transfer = max(getattr(one.transfer, bound) for one in times)
        assert work.schedule is not None  # noqa: S101 - the caller asked
        return work.schedule_runs * simulate(work.schedule, seconds, work.micro_batches, per_rank, transfer)

    return Range(max(0.0, step("low") - slowest.passes.low), max(0.0, step("high") - slowest.passes.high))


def _host_assumptions(work: RunWork, hardware: Hardware) -> list[str]:
    found = []
    if any(message.name in (TO_DEVICE, TO_HOST) for one in work.ranks for message in one.messages):
        known = hardware.links.get("pcie")
        link = (
            f"{HOST_LINKS.low / 1e9:g} to {HOST_LINKS.high / 1e9:g} GB/s, because none is known"
            if known is None
            else f"{known / 1e9:g} GB/s: {hardware.sources.get('pcie', 'given')}"
        )
        found.append(
            f"each device has its own link to the host, of {link}; the lower bound hides copies behind computation"
        )
    if any(operation.phase == ON_HOST for one in work.ranks for operation in one.operations):
        found.append(
            f"the optimizer steps in the memory of the host, of {HOST_MEMORY.low / 1e9:g} to "
            f"{HOST_MEMORY.high / 1e9:g} GB/s for all processes of a machine"
        )
    return found


def _assumptions(work: RunWork, hardware: Hardware, efficiency: Efficiency, dtype: str) -> tuple[str, ...]:
    found = [efficiency.sentence()]
    if work.world_size > 1 and _hides_messages(hardware):
        found.append("the lower bound hides all messages of sharding behind computation, the upper bound none of them")
    found += _host_assumptions(work, hardware)
    if work.world_size > work.local_world_size and "network" in hardware.links:
        found.append(f"network of {hardware.links['network'] / 1e9:g} GB/s: {hardware.sources.get('network', 'given')}")
    key = "fp8" if dtype.startswith("float8") else _RATES.get(dtype, "fp32")
    if key not in hardware.peak_flops:
        found.append(f"{hardware.title} has no rate for {dtype}: its rate for wider numbers is used")
    elif key in hardware.unverified:
        found.append(f"the {key} rate of {hardware.title} was not found in a document")
    found.append(
        "model FLOPs are those of matrix products and attention, with half of a causal attention, in packed rows "
        "inside of documents, and nothing that is recomputed; an attention with another mask or with dropout counts "
        "in full"
    )
    return tuple(found)
