"""A module of the project's own: two convolutions and a linear layer, which return logits."""

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """A small CNN for images with one channel.

    Args:
        num_classes: the number of classes.
        width: the number of channels of the first convolution.

    Shapes:
        pixel_values: (B, 1, H, W). Returns (B, num_classes).
    """

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.layers(pixel_values))
