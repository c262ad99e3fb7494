"""Losses of this project."""

import torch
from torch.nn import functional


def smoothed_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, smoothing: float = 0.0, reduction: str = "mean"
) -> torch.Tensor:
    """Returns the cross entropy of the next token, with smoothed labels."""
    return functional.cross_entropy(
        logits[..., :-1, :].flatten(0, -2),
        labels[..., 1:].flatten(),
        ignore_index=-100,
        label_smoothing=smoothing,
        reduction=reduction,
    )
