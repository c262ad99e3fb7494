"""The rule of losses of single answers that were judged good or bad, such as KTO.

Takes the batches of `PreferenceCollator` for rows of `tokenize_feedback`: an answer, and an answer to another prompt,
from which the divergence of the model from its reference is estimated. Gives the sum of losses over rows.

Shapes:
    B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.losses import logits_of
from forgather.ml.model_inputs import PRIVATE, SHIFTED
from forgather.ml.preference_rules import (
    REFERENCE_KEY,
    AnswerRule,
    as_sequences,
    has_targets,
    require_causal,
    sequence_logps,
    warn_of_dropout,
)

_OTHERS = f"{PRIVATE}kl_sequences"
"""The key of the prepared batch of answers that belong to other prompts, from which KTO estimates the divergence."""
DIVERGENCE = f"{PRIVATE}kl"
"""The key of the estimated divergence from the reference, which is the same in all batches of a step."""


class FeedbackLoss(Protocol):
    """A loss of single answers that were judged good or bad."""

    needs_divergence: bool

    def feedback_losses(self, ratios_B: Tensor, is_good_B: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each answer, and its reward, without gradients.

        Args:
            ratios_B: the log-probabilities of the answers minus those under the reference.
            is_good_B: whether each answer was judged good.
            divergence: the estimated divergence of the model from the reference, at least 0.

        Shapes:
            ratios_B, is_good_B: (B,); divergence: a scalar. Returns (B,) and (B,).
        """
        ...


class FeedbackRule(AnswerRule):
    """The rule of losses of single answers, which are compared with the divergence from the reference.

    The divergence is a mean over all rows of an optimizer step, or of an evaluation set: over micro-batches and ranks.
    It is estimated from answers that belong to other prompts. The trainer computes it before the step
    (`trainer.divergence`), so accumulation and the number of ranks do not change it.

    Args:
        model: a causal language model.
        loss: the loss, which has the formula.

    Raises:
        TrainingError: FG916 if the model is not a causal language model.
    """

    needs_reference = True
    judges = True

    def __init__(self, model: nn.Module, loss: FeedbackLoss) -> None:
        require_causal(model, loss)
        super().__init__(model)
        self._loss = loss
        self.estimates_divergence = loss.needs_divergence
        warn_of_dropout(model)

    def _prepared(self, batch: Mapping[str, Any]) -> Any:
        labels_B = batch["labels"]
        both = as_sequences(batch)
        # The first of both sequences is the answer itself.
        parts = [
            {name: item[place::2] for name, item in both.items() if name != REFERENCE_KEY and item.ndim > 1}
            for place in (0, 1)
        ]
        reference = {REFERENCE_KEY: both[REFERENCE_KEY].view(-1, 2)} if REFERENCE_KEY in both else {}
        own = {**parts[0], "labels": labels_B, _OTHERS: self._inputs.prepared(parts[1]), **reference}
        return self._inputs.prepared(own)

    def _valid(self, batch: Any) -> Tensor:
        return has_targets(batch[SHIFTED])

    def answer_logps(self, predict: Callable[[Any], Any], batch: Any) -> Tensor | None:
        """Returns the log-probabilities of the answer of each row and of the answer to another prompt.

        Args:
            predict: a function that returns the model's output for a prepared batch, or None on a rank without one. It
                is called twice on every rank.
            batch: the prepared batch.

        Shapes:
            Returns (B, 2).
        """
        # Both calls come first: a rank without outputs takes part in them.
        outputs = [(predict(part), part) for part in (batch, batch[_OTHERS])]
        if any(output is None for output, _ in outputs):
            return None
        return torch.stack([sequence_logps(logits_of(output), part[SHIFTED]) for output, part in outputs], dim=1)

    def divergence_sums(self, predict: Callable[[Any], Any], batch: Any) -> Tensor | None:
        """Returns the sum of the log-ratios of the answers to other prompts, and the number of rows.

        Args:
            predict: a function that returns the model's output for a prepared batch, or None on a rank without one.
            batch: the prepared batch.

        Shapes:
            Returns (2,), in float64 where the device has it.
        """
        others = batch[_OTHERS]
        output = predict(others)
        if output is None:
            return None
        logps_B = sequence_logps(logits_of(output), others[SHIFTED])
        ratios_B = logps_B - self._reference(batch, logps_B)[:, 1]
        valid_B = self._valid(batch)
        kind = torch.float32 if logps_B.device.type == "mps" else torch.float64
        return torch.stack([torch.where(valid_B, ratios_B, torch.zeros_like(ratios_B)).to(kind).sum(), valid_B.sum()])

    def _losses(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logps_B = sequence_logps(logits_of(output), batch[SHIFTED])
        ratios_B = logps_B - self._reference(batch, logps_B)[:, 0]
        divergence = batch.get(DIVERGENCE)
        if divergence is None:
            if self.estimates_divergence:
                raise TrainingError(
                    f"{type(self._loss).__name__} needs an estimate over all rows of a step, and the batch has none",
                    code="FG914",
                    hint="train and evaluate with a trainer of Forgather, which computes it before each step",
                )
            divergence = torch.zeros(())
        return self._loss.feedback_losses(ratios_B, batch["labels"] == 1, divergence.to(ratios_B))
