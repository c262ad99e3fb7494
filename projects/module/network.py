"""A module of the project's own: the logarithms of measurements pass two linear layers."""

from torch import Tensor, nn


class Network(nn.Module):
    """Two linear layers after a logarithm, which brings measurements of different units to one scale.

    Args:
        num_inputs: the number of measurements.
        num_classes: the number of classes.
        width: the number of units between the two layers.

    Shapes:
        measurements: (B, num_inputs). Returns (B, num_classes).
    """

    def __init__(self, num_inputs: int, num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, measurements: Tensor) -> Tensor:
        return self.layers(measurements.log1p())
