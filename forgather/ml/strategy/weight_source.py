"""Where initial weights come from: a file, an existing model, or the fills of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from forgather.ml.strategy.state import Box


class WeightSource(Protocol):
    """Where initial weights come from: a file, an existing model, or the fills of a model.

    `names` are the names of the weights.
    """

    names: list[str]

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of a whole weight.

        Raises:
            KeyError: if there is no weight with this name.
        """
        ...

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of a weight on the CPU, in memory of its own.

        Args:
            fqn: the name of the weight.
            box: the part, as one slice for each dimension.
            dtype: the dtype of the result; None for that of the weight.

        Shapes:
            Returns the lengths of the slices.

        Raises:
            KeyError: if there is no weight with this name.
        """
        ...


class ModelValues:
    """The weights of an existing model.

    Args:
        values: the weights by name.
        names: their names.
    """

    def __init__(self, values: Mapping[str, Tensor], names: list[str]) -> None:
        self.values = dict(values)
        self.names = names

    def shape(self, fqn: str) -> torch.Size:
        """Returns the shape of one weight, see `WeightSource`."""
        return self.values[fqn].shape

    def part(self, fqn: str, box: Box, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a part of one weight, see `WeightSource`."""
        value = self.values[fqn].detach()
        return value[box].to(device="cpu", dtype=value.dtype if dtype is None else dtype, copy=True)
