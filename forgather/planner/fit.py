"""Whether the ranks of a plan fit on a device, and by how much.

Takes a memory plan as data and a `Hardware`; gives a `RankFit` per range of ranks. To what the plan traced, it adds
what no trace can see: the context of the device, workspaces of libraries, buffers of NCCL, and fragmentation. These
rows are assumed, each with a lower and an upper bound, so the answer has three forms: it fits, it may fit, it does not.

Units:
    bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from forgather.errors import PlanError
from forgather.planner.hardware import Hardware
from forgather.planner.memory_plan import Source, format_size

_MIB = 2**20


class Verdict(StrEnum):
    """The answer for a rank: `FITS` even with the upper bounds, `MAY_FIT` with the lower ones only, or `TOO_LARGE`."""

    FITS = "fits"
    MAY_FIT = "may fit"
    TOO_LARGE = "does not fit"


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """A use of memory that no trace sees, between two bounds.

    Args:
        name: what the memory is used for.
        least: the lower bound in bytes.
        most: the upper bound in bytes.
        basis: where the bounds come from.
        source: how they were found.
    """

    name: str
    least: int
    most: int
    basis: str
    source: Source = Source.ASSUMED


@dataclass(frozen=True, kw_only=True)
class RankFit:
    """Whether ranks that hold parts of the same size fit on a device.

    Args:
        ranks: the first and the last rank of the range.
        peak_bytes: the planned peak of the rank.
        overheads: what is assumed on top of it.
        held_bytes: what other processes hold on the device; 0 if it is not known.
        memory_bytes: the memory of the device.
        largest: the name of the largest row at the peak.
        largest_bytes: its size.
        chosen_bytes: what of the peak torch may recompute, as `activation_memory_budget` says.
    """

    ranks: tuple[int, int]
    peak_bytes: int
    overheads: tuple[Overhead, ...]
    held_bytes: int
    memory_bytes: int
    largest: str
    largest_bytes: int
    chosen_bytes: int = 0

    @property
    def least(self) -> int:
        """The need of the rank with the lower bounds of all overheads, and of activations that torch may recompute."""
        return self.peak_bytes - self.chosen_bytes + sum(overhead.least for overhead in self.overheads)

    @property
    def most(self) -> int:
        """The need of the rank with the upper bounds of all overheads."""
        return self.peak_bytes + sum(overhead.most for overhead in self.overheads)

    @property
    def available(self) -> int:
        """The memory that other processes leave."""
        return max(0, self.memory_bytes - self.held_bytes)

    @property
    def verdict(self) -> Verdict:
        """Whether the rank fits."""
        if self.most <= self.available:
            return Verdict.FITS
        return Verdict.MAY_FIT if self.least <= self.available else Verdict.TOO_LARGE

    def as_data(self) -> dict[str, Any]:
        """Returns the fields and the sums as plain data."""
        sums = {"least": self.least, "most": self.most, "available": self.available, "verdict": str(self.verdict)}
        return {**asdict(self), **sums}


def overheads(kind: str, peak_bytes: int, mesh: Mapping[str, int], convolution_bytes: int = 0) -> tuple[Overhead, ...]:
    """Returns what a device of a kind holds besides tensors.

    Args:
        kind: the kind of the device, see `Hardware`. Processors have no overhead of this sort.
        peak_bytes: the peak of the tensors of a rank.
        mesh: the size of each mesh axis; each axis above 1 has a communicator.
        convolution_bytes: the bytes of the arguments and results of the largest convolution.
    """
    if kind == "cpu":
        return ()
    found = [
        Overhead(
            name="device context",
            least=300 * _MIB,
            most=1000 * _MIB,
            basis="reports in pytorch issues 107667 and 28394",
        ),
        Overhead(
            name="library workspaces",
            least=8 * _MIB,
            most=128 * _MIB,
            basis="torch's cuBLAS workspaces: 8 MiB, or 32 MiB on Hopper, for 1 to 4 handles",
        ),
    ]
    if convolution_bytes:
        found.append(
            Overhead(
                name="workspaces of convolutions",
                least=0,
                most=convolution_bytes,
                basis="cuDNN may copy what the largest convolution reads and writes into another layout",
            )
        )
    communicators = sum(size > 1 for size in mesh.values())
    if communicators:
        found.append(
            Overhead(
                name="NCCL buffers",
                least=200 * _MIB * communicators,
                most=1000 * _MIB * communicators,
                basis="reports in nccl issues 964 and 864; one communicator for each mesh axis",
            )
        )
    found.append(
        Overhead(
            name="fragmentation",
            least=peak_bytes // 100,
            most=peak_bytes * 30 // 100,
            basis="1 to 30 % of the peak: torch reserved 2 to 28 % more in 40 runs on an H100",
        )
    )
    return tuple(found)


def worst_fit(fits: Iterable[RankFit]) -> RankFit | None:
    """Returns the fit of the rank that decides: of those with the worst verdict, the one with the largest need."""
    order = list(Verdict)
    return max(fits, key=lambda fit: (order.index(fit.verdict), fit.least, fit.most), default=None)


def surely_fits(fit: Mapping[str, Any]) -> bool:
    """Returns whether every rank fits even with the upper bounds; true if the memory of the device is unknown.

    Args:
        fit: the fits of the ranks as data, each as `RankFit.as_data` gives it, under "ranks".
    """
    return all(rank["verdict"] == Verdict.FITS for rank in fit["ranks"])


def lacks_memory(fit: Mapping[str, Any] | None) -> bool:
    """Returns whether some rank does not fit even with the lower bounds; false if the memory of the device is unknown.

    Args:
        fit: the fits of the ranks as data, see `surely_fits`; None if no device is known.
    """
    return fit is not None and any(rank["verdict"] == Verdict.TOO_LARGE for rank in fit["ranks"])


def largest_peak(
    hardware: Hardware, mesh: Mapping[str, int], *, held_bytes: int = 0, convolution_bytes: int = 0
) -> float:
    """Returns the largest peak with which a rank fits, even with the upper bounds of what no trace sees.

    Args:
        hardware: the device, whose memory is known.
        mesh: the size of each mesh axis.
        held_bytes: what other processes hold on the device.
        convolution_bytes: the bytes of the arguments and results of the largest convolution.
    """
    assert hardware.memory_bytes is not None  # noqa: S101 - the caller asked
    fixed, at_large = (
        sum(one.most for one in overheads(hardware.kind, peak, mesh, convolution_bytes)) for peak in (0, _LARGE)
    )
    share = (at_large - fixed) / _LARGE
    return max(0.0, (hardware.memory_bytes - held_bytes - fixed) / (1 + share))


def refuse_without_room(hardware: Hardware, mesh: Mapping[str, int], *, held_bytes: int = 0) -> None:
    """Raises an error if what no trace sees takes all the memory of a device.

    Args:
        hardware: the device, whose memory is known.
        mesh: the size of each mesh axis.
        held_bytes: what other processes hold on the device.

    Raises:
        PlanError: FG992 with the memory that is free, and what is needed before the first tensor.
    """
    free = max(0, (hardware.memory_bytes or 0) - held_bytes)
    rows = [one for one in overheads(hardware.kind, 0, mesh) if one.most]
    if free > (need := sum(one.most for one in rows)):
        return
    names = ", ".join(f"{one.name} {format_size(one.most)}" for one in rows)
    raise PlanError(
        f"of {hardware.title}, {format_size(free)} are free, and a process may need {format_size(need)} before its "
        "first tensor",
        code="FG992",
        hint=f"take a device with more free memory; at most: {names}" if rows else "free memory on the device",
    )


_LARGE = 10**12  # bytes; overheads are affine in the peak


def fit_plan(plan: Mapping[str, Any], hardware: Hardware, *, held_bytes: int = 0) -> tuple[RankFit, ...]:
    """Returns whether each rank of a plan fits; empty if the memory of the hardware is unknown.

    Args:
        plan: the plan as data, see `forgather.planner.memory_plan.MemoryPlan`.
        hardware: the device of each rank.
        held_bytes: what other processes hold on the device.
    """
    if hardware.memory_bytes is None:
        return ()
    found = []
    for rank in plan["ranks"]:
        phase = max(rank["phases"], key=_size)
        rows = sorted(phase["rows"], key=lambda row: -row["num_bytes"])
        fit = RankFit(
            ranks=tuple(rank["ranks"]),
            peak_bytes=_size(phase),
            overheads=overheads(hardware.kind, _size(phase), plan["mesh"], plan.get("convolution_bytes", 0)),
            held_bytes=held_bytes,
            memory_bytes=hardware.memory_bytes,
            largest=rows[0]["name"] if rows else "",
            largest_bytes=rows[0]["num_bytes"] if rows else 0,
            chosen_bytes=0 if rank.get("least_bytes") is None else _size(phase) - rank["least_bytes"],
        )
        found.append(fit)
    return tuple(found)


def _size(phase: Mapping[str, Any]) -> int:
    return sum(row["num_bytes"] for row in phase["rows"])
