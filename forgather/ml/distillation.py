"""`DistillationLoss`: a student learns the token probabilities of a teacher.

Takes the same rows as the token loss of a causal language model: only positions with a label count, and the loss is
divided by their number. So rows of chats, of examples and of packed text are distilled as they are trained on.

Shapes:
    B rows, T positions, V vocabulary, N positions with a label.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from forgather.errors import TrainingError, first_line
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.hub import lookup_hint
from forgather.ml.log import get_logger
from forgather.ml.losses import IGNORE_INDEX, CausalTokenLoss, LossRule, at_least_float32, count_valid, logits_of
from forgather.ml.model_inputs import ModelInputs
from forgather.ml.models import ModelSourceError, from_pretrained
from forgather.ml.preference_rules import require_causal
from forgather.ml.random_state import seeded_random

_log = get_logger(__name__)


class DistillationLoss:
    """The forward Kullback-Leibler divergence from a teacher to the model, and optionally the token loss.

    The loss of a position is `weight` T^2 KL(teacher / T || model / T) + (1 - `weight`) times its cross entropy, where
    both logits are divided by the temperature T. The factor T^2 keeps the size of gradients independent of T. In
    training, the auxiliary loss of a mixture of experts is added with its own coefficient, as to the token loss.

    Every rank that computes losses holds the whole teacher, whatever the strategy is.

    Args:
        teacher: the folder or name of the teacher, a causal language model with the same tokenizer.
        temperature: the temperature of both distributions.
        weight: the weight of the teacher, above 0 and at most 1.

    Raises:
        TrainingError: FG917 if a setting is out of its range.

    Source:
        Hinton et al. 2015 (arXiv:1503.02531). As `GKDTrainer.generalized_jsd_loss` of TRL with beta 0. Difference: TRL
        leaves out the factor T^2.
    """

    def __init__(self, *, teacher: str | os.PathLike[str], temperature: float = 1.0, weight: float = 1.0) -> None:
        refuse_wrong_values("distillation:DistillationLoss", locals())
        self.teacher, self.temperature, self.weight = teacher, temperature, weight

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule that applies this loss to batches.

        Raises:
            TrainingError: FG916 if the model is not a causal language model; FG918 if the teacher has another
                vocabulary; FG840 if there is no teacher.
        """
        require_causal(model, self)
        return DistillationRule(model, self)


class DistillationRule(CausalTokenLoss):
    """The rule of `DistillationLoss`, which loads the teacher with the first batch.

    Args:
        model: the student.
        loss: the loss, which has the settings.
    """

    def __init__(self, model: nn.Module, loss: DistillationLoss) -> None:
        super().__init__(model)
        self.is_token_entropy = False
        self._loss = loss
        self._teacher: nn.Module | None = None
        self._teacher_inputs: ModelInputs
        # Before anything is trained, and without its weights: a rank without losses needs no teacher.
        sizes = [_vocabulary_of(loss.teacher), getattr(getattr(model, "config", None), "vocab_size", None)]
        if sizes[0] != sizes[1]:
            raise TrainingError(
                f"the teacher {str(loss.teacher)!r} has {sizes[0]} tokens, and the model has {sizes[1]}",
                code="FG918",
                hint="take a teacher with the same tokenizer",
            ).about("loss_fn.teacher")

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        targets_BT = self._needed_targets(batch)
        output = self._inputs.call(model, batch)
        logits_BTV = logits_of(output)
        valid_BT = targets_BT != IGNORE_INDEX
        weight, temperature = self._loss.weight, self._loss.temperature
        student_NV = at_least_float32(logits_BTV[valid_BT])
        teacher_NV = self._teacher_logits(batch, logits_BTV.device)[valid_BT].to(student_NV) / temperature
        student_logps_NV = (student_NV / temperature).log_softmax(-1)
        divergence = F.kl_div(student_logps_NV, teacher_NV.log_softmax(-1), reduction="sum", log_target=True)
        found: Tensor = weight * temperature**2 * divergence
        if weight < 1:
            found = found + (1 - weight) * F.cross_entropy(student_NV, targets_BT[valid_BT], reduction="sum")
        return self._with_auxiliary(found, output, lambda: count_valid(targets_BT, batch))

    @torch.no_grad()
    def _teacher_logits(self, batch: Any, device: torch.device) -> Tensor:
        if self._teacher is None:
            # Loading may draw random numbers, and a resumed run loads later than the run that it continues.
            with seeded_random(0):
                teacher: nn.Module = from_pretrained(self._loss.teacher)
            self._teacher = teacher.to(device).eval().requires_grad_(False)
            self._teacher_inputs = ModelInputs(self._teacher)
            _log.info("teacher %s loaded", self._loss.teacher)
        return logits_of(self._teacher_inputs.call(self._teacher, batch))


def _vocabulary_of(teacher: str | os.PathLike[str]) -> int | None:
    try:
        config = AutoConfig.from_pretrained(os.path.expanduser(teacher))
    except (OSError, ValueError) as error:
        raise ModelSourceError(
            f"the teacher {str(teacher)!r} could not be loaded: {first_line(error)}", hint=lookup_hint(str(teacher))
        ).about("loss_fn.teacher") from error
    return getattr(config, "vocab_size", None)
