"""`RewardMetrics`: how far the rewards of good and of bad answers differ in an evaluation.

Takes the rewards that the rules of `ml.preference_rules` give as the output of an evaluation; gives means under the
names that TRL uses.

Shapes:
    N rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class RewardMetrics:
    """Computes the metrics of an evaluation of preferences from the rewards of all rows.

    For pairs: the mean rewards of both answers, the mean difference, and the fraction of pairs whose chosen answer has
    the larger reward. For single answers: the mean rewards of good and of bad ones, and their difference; a mean over
    no answers is left out.

    Example:
        >>> from transformers import EvalPrediction
        >>> rewards = np.array([[1.0, 0.0], [0.0, 0.5]])
        >>> metrics = RewardMetrics()(EvalPrediction(rewards, np.array([0, 0])))
        >>> metrics["rewards/margins"], metrics["rewards/accuracies"]
        (0.25, 0.5)
    """

    def __call__(self, prediction: Any) -> dict[str, float]:
        """Returns the metrics by name.

        Args:
            prediction: a `transformers.EvalPrediction` with rewards of shape (N, 2) or (N,), and labels (N,).
        """
        rewards = np.asarray(prediction.predictions, dtype=np.float64)
        if rewards.ndim == 2:
            chosen, rejected = rewards[:, 0], rewards[:, 1]
            accuracy = {"rewards/accuracies": float((chosen > rejected).mean())}
        else:
            labels = np.asarray(prediction.label_ids)
            chosen, rejected, accuracy = rewards[labels == 1], rewards[labels == 0], {}
        means = {
            name: float(values.mean())
            for name, values in (("rewards/chosen", chosen), ("rewards/rejected", rejected))
            if len(values)
        }
        margins = {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]} if len(means) == 2 else {}
        return {**means, **margins, **accuracy}
