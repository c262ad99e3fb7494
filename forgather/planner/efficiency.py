"""How much of its peak rates a device reaches: assumed as ranges, or fitted to runs that were measured.

The assumed ranges hold for large models in eager PyTorch. `fgcli plan --calibrate` replaces each by one number and
stores them as `efficiency` of a hardware file.

Source:
    Matrix products: 0.4 to 0.75 of the dense peak. Whole steps reach 0.38 to 0.43 on H100 (Llama 3, 2024, table 4) and
    up to 0.52 on A100 (Megatron-LM, Narayanan et al. 2021: 502 PFLOP/s on 3,072); products alone reach more. Both were
    looked up in summaries of these papers (2026-11). The shares of memory, messages and calls are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Range:
    """A number that is known to lie between two bounds.

    Args:
        low: the lower bound.
        high: the upper bound.
    """

    low: float = 0.0
    high: float = 0.0

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    @property
    def middle(self) -> float:
        """The number halfway between the bounds."""
        return (self.low + self.high) / 2

    def times(self, number: float) -> Range:
        """Returns the range of the product with a number that is not negative."""
        return Range(self.low * number, self.high * number)

    def under(self, number: float) -> Range:
        """Returns the range of `number` divided by this range, whose bounds change places."""
        return Range(number / self.high, number / self.low)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The reached shares of peak rates.

    Args:
        compute: the share of the peak rate of operations, of matrix products and attention.
        memory: the share of the memory bandwidth, of all other operators.
        communication: the share of the bandwidth of links; of the memory bandwidth where no link is known.
        call_seconds: the least time of an operator, whatever its size: on a GPU, what the host needs to start it.
        message_seconds: the time of one step of a collective, whatever its size; inside of a machine.
        network_seconds: the same between machines.
        source: where the numbers come from.
    """

    compute: Range = Range(0.4, 0.75)
    memory: Range = Range(0.6, 0.9)
    communication: Range = Range(0.5, 0.9)
    call_seconds: Range = Range(2e-6, 20e-6)
    message_seconds: Range = Range(2e-6, 6e-6)
    network_seconds: Range = Range(5e-6, 20e-6)
    source: str = "assumed"

    def slowed(self, factors: Mapping[str, float], source: str) -> Efficiency:
        """Returns one number for each range: its middle, with which work takes `factors` times as long.

        Args:
            factors: a factor above 0 for each name of `EFFICIENCIES`; a missing one is 1.
            source: where the factors come from.
        """
        found = {}
        for name in EFFICIENCIES:
            value = getattr(self, name).middle
            factor = factors.get(name, 1.0)
            value = value * factor if name.endswith("_seconds") else value / factor
            found[name] = Range(value, value)
        return replace(self, **found, source=source)

    def sentence(self) -> str:
        """Returns the efficiencies as one sentence."""

        def share(value: Range) -> str:
            return f"{value.low:.2g}" if value.low == value.high else f"{value.low:.2g} to {value.high:.2g}"

        return (
            f"matrix products and attention reach {share(self.compute)} of the peak rate, other operators "
            f"{share(self.memory)} of the memory bandwidth, messages {share(self.communication)} of the link "
            f"({self.source})"
        )


EFFICIENCIES = tuple(one.name for one in fields(Efficiency) if one.name != "source")
"""The names of the numbers of an `Efficiency`."""

ON_PROCESSORS = Efficiency(
    communication=Range(0.05, 0.3),
    call_seconds=Range(5e-6, 20e-6),
    message_seconds=Range(50e-6, 200e-6),
    network_seconds=Range(50e-6, 200e-6),
)
"""What is assumed of processors, whose messages gloo sends through the network stack of the machine."""


def assumed_of(kind: str) -> Efficiency:
    """Returns what is assumed of a kind of hardware: "cuda", "rocm" or "cpu"."""
    return ON_PROCESSORS if kind == "cpu" else Efficiency()
