"""What the loss of a token consists of, and what a model does with the output of its head to get logits.

Shapes:
    N tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What the loss of one token consists of.

    Args:
        ignore_index: the target of tokens that do not contribute to the loss.
        label_smoothing: the label smoothing, as in `torch.nn.functional.cross_entropy`.
        z_loss: the coefficient of the squared logarithm of the softmax's denominator, which is added to the loss.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class LogitMap:
    """What a model does with the output of its head: a factor, and after it a soft cap.

    Args:
        factor: the number by which the output is multiplied.
        cap: the bound of the logits, which become `cap * tanh(logits / cap)`. None if they have no bound.
    """

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Returns the logits that the model makes from the output of its head.

        Shapes:
            values: any shape. Returns the same shape.
        """
        if self.factor != 1.0:
            values = values * self.factor
        return values if self.cap is None else torch.tanh(values / self.cap) * self.cap


UNCHANGED = LogitMap()
"""The map of a model that returns the output of its head as its logits."""


def z_loss_of(logits_NV: Tensor, targets_N: Tensor, terms: LossTerms) -> Tensor:
    """Returns the sum of the z-losses of the valid targets, for logits that exist.

    Args:
        logits_NV: the logits, in float32 or float64.
        targets_N: the target of each token.
        terms: what the loss of a token consists of.

    Shapes:
        logits_NV: (N, V); targets_N: (N,). Returns a scalar.

    Source:
        PaLM (Chowdhery et al., 2022), section 5: `1e-4 * log(Z) ** 2`.
    """
    squares_N = torch.logsumexp(logits_NV, dim=-1) ** 2
    return terms.z_loss * torch.where(targets_N != terms.ignore_index, squares_N, torch.zeros_like(squares_N)).sum()
