"""The memory of a run as rows: what each rank holds at the peak of each phase, and how each row was found.

These are plain values, which `forgather/ml/planner` fills, and which commands print, save and compare with devices.

Units:
    bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

PLAN_FILE = "plan.json"
"""The file of a run folder that has the plan of the run, and whether it fits."""

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
"""The names of the rows of what may be in the memory of the host, and of these parts in a choice."""

OPTIMIZER_STEP = "optimizer step"
"""The part of a step in which the weights are updated."""


class Source(StrEnum):
    """How a number was found.

    `TRACED`: the code of the run was executed with tensors that have no values. `FORMULA`: computed from settings and
    sizes. `ASSUMED`: a usual value, which the run may miss.
    """

    TRACED = "traced"
    FORMULA = "formula"
    ASSUMED = "assumed"


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One use of memory.

    Args:
        name: what the memory is used for.
        num_bytes: the size in bytes.
        source: how the size was found.
    """

    name: str
    num_bytes: int
    source: Source = Source.TRACED


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory of one rank at the peak of one phase.

    Args:
        phase: "training step", "evaluation", "generation" (of answers to prompts) or "saving".
        at: where in the phase the peak is, such as "backward pass of block 30 of 32".
        made_by: the operator that allocated last before the peak, and the tensor that it returned.
        rows: the uses of memory, largest first.
    """

    phase: str
    at: str
    made_by: str
    rows: tuple[MemoryRow, ...]

    @property
    def num_bytes(self) -> int:
        """The sum of all rows."""
        return sum(row.num_bytes for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class PlaceMemory:
    """The memory of one rank at the peak of one part of a step.

    Between two places that follow each other, blocks may be left out: the sums are on a line between them.

    Args:
        phase: "forward", "backward", "update", "evaluation" or "generation".
        block: the index of the block; -1 before the first block and outside of passes, and the number of blocks after
            the last one.
        at: the place in words.
        uses: the uses of memory.
    """

    phase: str
    block: int
    at: str
    uses: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of a range of ranks that hold parts of the same size.

    Args:
        ranks: the first and the last rank of the range.
        stages: the numbers of the pipeline stages on these ranks; empty without a pipeline.
        phases: the phases of the run.
        timeline: the parts of the step, in the order in which the first micro-batch passes them.
        host: what each of them keeps in the memory of the host while its device computes, which no phase counts.
        least_bytes: the peak if blocks recompute all activations; None without an `activation_memory_budget`, by which
            torch chooses what blocks keep when it compiles. The phases are those of blocks that keep everything.
    """

    ranks: tuple[int, int]
    stages: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]
    timeline: tuple[PlaceMemory, ...] = ()
    host: tuple[MemoryRow, ...] = ()
    least_bytes: int | None = None

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.num_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of a run.

    Args:
        world_size: the number of processes.
        device_type: the kind of device, "cpu" or "cuda": optimizers take another path on a GPU.
        strategy: the name of the strategy class.
        mesh: the size of each mesh axis, by name.
        parameters: the number of elements of the whole model.
        trainable: the number of those that are trained.
        rows_per_update: the number of rows of one optimizer step, over all data-parallel ranks.
        tokens_per_row: the number of tokens of the longest row of the batch that was planned; None if rows have none.
        ranks: the ranks, the one with the largest peak first.
        model_bytes: the parameters and buffers of the whole model, wherever they are.
        weights_bytes: the weights that a checkpoint stores; None if that is unknown.
        optimizer_bytes: the optimizer state that a checkpoint stores; None if that is unknown.
        settings: the settings of the run that decide what can make it smaller, such as `gradient_checkpointing`.
        notes: what the plan leaves out or assumes, one sentence each.
        convolution_bytes: the bytes of the arguments and results of the largest convolution on a GPU, where libraries
            may copy them.
        most_rows: the largest number of rows of a micro-batch for which the data suffices; None if it is unknown.
    """

    world_size: int
    device_type: str
    strategy: str
    mesh: Mapping[str, int]
    parameters: int
    trainable: int
    rows_per_update: int
    tokens_per_row: int | None
    ranks: tuple[RankMemory, ...]
    model_bytes: int
    weights_bytes: int | None = None
    optimizer_bytes: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    convolution_bytes: int = 0
    most_rows: int | None = None

    def as_data(self) -> dict[str, Any]:
        """Returns the plan as plain data, with the sum of each phase."""
        data = asdict(self)
        for rank, found in zip(data["ranks"], self.ranks, strict=True):
            for phase, memory in zip(rank["phases"], found.phases, strict=True):
                phase["num_bytes"] = memory.num_bytes
        return data


def format_size(num_bytes: float) -> str:
    """Returns a number of bytes with a unit.

    Example:
        >>> format_size(13_500_000_000), format_size(10**15), format_size(2**20 - 1)
        ('12.6 GiB', '909.5 TiB', '1.0 MiB')
    """
    for unit, least in (("EiB", 2**60), ("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # What would be rounded to 1024.0 of the smaller unit is 1.0 of this one.
        if num_bytes >= least * (1 - 0.05 / 1024):
            number = num_bytes / least
            return f"{number:.1f} {unit}" if number < 10**4 else f"{number:.3g} {unit}"
    return f"{int(num_bytes)} B"


def parse_size(text: object) -> int | None:
    """Returns the number of bytes of a text such as 24GB or 22.5GiB; None if it is not a size above 0 with a unit.

    Example:
        >>> parse_size("24GB"), parse_size("24")
        (24000000000, None)
    """
    written = str(text)
    unit = next((unit for unit in SIZE_UNITS if written.endswith(unit)), "")
    with suppress(ValueError, OverflowError):
        size = int(float(written.removesuffix(unit)) * SIZE_UNITS.get(unit, 0))
        return size if size > 0 else None
    return None


SIZE_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""The units of sizes, in bytes."""
