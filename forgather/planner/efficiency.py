"""How much of its peak rates a device reaches: assumed as ranges, or fitted to a run that was measured.

The assumed ranges hold for large models in eager PyTorch on GPUs. A calibration replaces each by one number.

Source:
    Matrix products: 0.4 to 0.75 of the dense peak. Whole steps reach 0.38 to 0.43 on H100 (Llama 3, 2024, table 4),
    0.44 to 0.52 on A100 (Megatron-LM, Narayanan et al. 2021, table 1) and 0.46 on TPU v4 (PaLM, 2022, table 3);
    products alone reach more. The shares of memory, messages and calls are assumed and were not measured here.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        communication: the share of the bandwidth of links.
        call_seconds: the least time of an operator, whatever its size.
        message_seconds: the time of one step of a collective, whatever its size; inside of a machine.
        network_seconds: the same between machines.
        source: where the numbers come from.
    """

    compute: Range = Range(0.4, 0.75)
    memory: Range = Range(0.6, 0.9)
    communication: Range = Range(0.5, 0.9)
    call_seconds: Range = Range(2e-6, 8e-6)
    message_seconds: Range = Range(2e-6, 6e-6)
    network_seconds: Range = Range(5e-6, 20e-6)
    source: str = "assumed"

    def sentence(self) -> str:
        """Returns the efficiencies as one sentence."""

        def share(value: Range) -> str:
            return f"{value.low:.2g}" if value.low == value.high else f"{value.low:.2g} to {value.high:.2g}"

        return (
            f"matrix products and attention reach {share(self.compute)} of the peak rate, other operators "
            f"{share(self.memory)} of the memory bandwidth, messages {share(self.communication)} of the link "
            f"({self.source})"
        )
