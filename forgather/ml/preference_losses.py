"""Losses of preferences: DPO with its variants, ORPO, KTO, and reward modelling.

Each loss is an object that a config gives to a trainer as `loss_fn`. It has the formula, and makes the rule that
applies it to batches of `PreferenceCollator` (`ml.preference_rules`). A loss is a sum over rows divided by their
number, so gradient accumulation and the number of ranks do not change it. Evaluations report the rewards of the
answers.

Shapes:
    B rows, P pairs.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgather.errors import TrainingError, nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.feedback_rule import FeedbackRule
from forgather.ml.losses import LossRule
from forgather.ml.preference_metrics import RewardMetrics
from forgather.ml.preference_rules import PairRule, PairScores
from forgather.ml.score_rule import ScoreRule

_DPO_TYPES = ("sigmoid", "robust", "hinge", "ipo")
_SMOOTHED = ("sigmoid", "robust")
_KTO_TYPES = ("kto", "apo_zero_unpaired")


class DPOLoss:
    """Direct preference optimization: raises the probability of chosen answers over that of rejected ones.

    With the log-ratios r of an answer between the model and the reference, and d = r(chosen) - r(rejected):

    | loss_type | loss of a pair |
    |---|---|
    | sigmoid | -log sigmoid(beta d), with label smoothing s: -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d) |
    | robust | (-(1 - s) log sigmoid(beta d) + s log sigmoid(-beta d)) / (1 - 2 s) |
    | hinge | max(0, 1 - beta d) |
    | ipo | (d' - 1 / (2 beta))^2, where d' is the difference of the log-ratios per token |

    Args:
        beta: how strongly the model is kept near the reference. Larger values keep it nearer.
        loss_type: "sigmoid", "robust", "hinge" or "ipo".
        label_smoothing: the assumed fraction of pairs with exchanged answers, from 0 to below 0.5. Only "sigmoid" and
            "robust" use it.
        sft_weight: the weight of the mean negative log-likelihood of each chosen answer, which is added. 0 for none.
        reference: the folder or name of the reference model. None for the model itself, with the weights before the
            first step.

    Raises:
        TrainingError: FG917 if a setting is out of its range.

    Source:
        Rafailov et al. 2023 (arXiv:2305.18290); "ipo": Azar et al. 2023; "robust": Chowdhury et al. 2024; label
        smoothing of "sigmoid": Mitchell 2023. As `trl.DPOTrainer`. Difference: the term of `sft_weight` is a mean over
        rows of means over tokens, as in Pang et al. 2024, so that it does not depend on how rows are batched.
    """

    needs_reference = True

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        sft_weight: float = 0.0,
        reference: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_wrong_values("preference_losses:DPOLoss", locals())
        _require_type(loss_type, _DPO_TYPES, "DPO")
        if label_smoothing and loss_type not in _SMOOTHED:
            hint = f"loss_type: sigmoid or robust, or label_smoothing: 0; {loss_type} has no such term"
            raise _bad_setting("label_smoothing", label_smoothing, f"has no effect on {loss_type!r}", hint)
        self.beta, self.loss_type, self.label_smoothing, self.sft_weight = beta, loss_type, label_smoothing, sft_weight
        self.reference = reference
        self.compute_metrics = RewardMetrics()

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule that applies this loss to batches.

        Raises:
            TrainingError: FG916 if the model is not a causal language model.
        """
        return PairRule(model, self)

    def pair_losses(self, scores: PairScores) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and the rewards of its answers: beta times their log-ratios.

        Shapes:
            Returns (P,) and (P, 2).
        """
        ratios_P2 = scores.ratios_P2
        losses_P = self._preferences(ratios_P2, scores.lengths_P2)
        if self.sft_weight:
            losses_P = losses_P + self.sft_weight * scores.chosen_nll_P
        return losses_P, self.beta * ratios_P2.detach()

    def _preferences(self, ratios_P2: Tensor, lengths_P2: Tensor) -> Tensor:
        if self.loss_type == "ipo":
            means_P2 = ratios_P2 / lengths_P2
            return (means_P2[:, 0] - means_P2[:, 1] - 1 / (2 * self.beta)) ** 2
        margins_P = self.beta * (ratios_P2[:, 0] - ratios_P2[:, 1])
        if self.loss_type == "hinge":
            return F.relu(1 - margins_P)
        smoothing = self.label_smoothing
        if not smoothing:
            return -F.logsigmoid(margins_P)
        kept_P, exchanged_P = -(1 - smoothing) * F.logsigmoid(margins_P), -smoothing * F.logsigmoid(-margins_P)
        return kept_P + exchanged_P if self.loss_type == "sigmoid" else (kept_P - exchanged_P) / (1 - 2 * smoothing)


class ORPOLoss:
    """Odds ratio preference optimization: learns chosen answers and prefers them, without a reference.

    The loss of a pair is the mean negative log-likelihood of the chosen answer, minus beta times the log-sigmoid of the
    log-odds ratio. The odds p / (1 - p) are those of the mean token probability of an answer.

    Args:
        beta: the weight of the odds ratio.
        includes_prompt: whether the negative log-likelihood is that of the prompt and the chosen answer, as in the
            authors' code and in TRL, or that of the answer alone, as in the paper.

    Raises:
        TrainingError: FG917 if a setting is out of its range.

    Source:
        Hong et al. 2024 (arXiv:2403.07691). As `trl.experimental.orpo.ORPOTrainer`. Difference: the negative
        log-likelihood is a mean over rows of means over tokens, so that it does not depend on how rows are batched.
    """

    needs_reference = False

    @property
    def trained_part(self) -> str:
        """The tokens whose probabilities the loss raises or lowers, for views of data."""
        return "chosen sequence" if self.includes_prompt else "answers"

    def __init__(self, *, beta: float = 0.1, includes_prompt: bool = True) -> None:
        refuse_wrong_values("preference_losses:ORPOLoss", locals())
        self.beta, self.includes_prompt = beta, includes_prompt
        self.compute_metrics = RewardMetrics()

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule that applies this loss to batches.

        Raises:
            TrainingError: FG916 if the model is not a causal language model.
        """
        return PairRule(model, self)

    def pair_losses(self, scores: PairScores) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and the rewards of its answers: beta times their mean log-probabilities.

        Shapes:
            Returns (P,) and (P, 2).
        """
        means_P2 = scores.logps_P2 / scores.lengths_P2
        odds_P2 = means_P2 - log_one_minus_exp(means_P2)
        nll_P = scores.sequence_nll() if self.includes_prompt else scores.chosen_nll_P
        return nll_P - self.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1]), self.beta * means_P2.detach()


def log_one_minus_exp(values: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) of numbers up to 0, without cancellation.

    The value at 0, which a mean log-probability has if every token is certain, is finite and has no gradient.

    Shapes:
        values: any shape. Returns the same shape.

    Example:
        >>> log_one_minus_exp(torch.tensor([-1e-4, -20.0]))
        tensor([-9.2104e+00, -2.0612e-09])
    """
    border = -math.log(2)
    # Each branch gets only its own numbers: a gradient of the other one may be NaN, and 0 * NaN is NaN.
    far, near = values.clamp(max=border), values.clamp(min=border, max=-torch.finfo(values.dtype).tiny)
    return torch.where(values < border, torch.log1p(-torch.exp(far)), torch.log(-torch.expm1(near)))


class KTOLoss:
    """Kahneman-Tversky optimization: learns from single answers that were judged good or bad.

    With the log-ratio r of an answer between the model and the reference, and the divergence z of the model from the
    reference (a mean over all rows of the step, at least 0):

    | loss_type | loss of a good answer | loss of a bad answer |
    |---|---|---|
    | kto | desirable_weight (1 - sigmoid(beta (r - z))) | undesirable_weight (1 - sigmoid(beta (z - r))) |
    | apo_zero_unpaired | desirable_weight (1 - sigmoid(beta r)) | undesirable_weight sigmoid(beta r) |

    Args:
        beta: how strongly the model is kept near the reference. Larger values keep it nearer.
        loss_type: "kto" or "apo_zero_unpaired".
        desirable_weight: the weight of good answers.
        undesirable_weight: the weight of bad answers. The sums of the weights of both kinds should be about equal.
        reference: the folder or name of the reference model. None for the model itself, with the weights before the
            first step.

    Raises:
        TrainingError: FG917 if a setting is out of its range.

    Source:
        Ethayarajh et al. 2024 (arXiv:2402.01306); "apo_zero_unpaired": D'Oosterlinck et al. 2024. As `trl.KTOTrainer`.
        Difference: z is a mean over the optimizer step instead of the micro-batch, and the answers from which it is
        estimated are exchanged over the whole data set.
    """

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_wrong_values("preference_losses:KTOLoss", locals())
        _require_type(loss_type, _KTO_TYPES, "KTO")
        self.beta, self.loss_type, self.reference = beta, loss_type, reference
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight
        self.needs_divergence = loss_type == "kto"
        self.compute_metrics = RewardMetrics()

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule that applies this loss to batches.

        Raises:
            TrainingError: FG916 if the model is not a causal language model.
        """
        return FeedbackRule(model, self)

    def feedback_losses(self, ratios_B: Tensor, is_good_B: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each answer, and its reward: beta times its log-ratio.

        Args:
            ratios_B: the log-probabilities of the answers minus those under the reference.
            is_good_B: whether each answer was judged good.
            divergence: the estimated divergence of the model from the reference.

        Shapes:
            ratios_B, is_good_B: (B,); divergence: a scalar. Returns (B,) and (B,).
        """
        # 1 - sigmoid(x) is sigmoid(-x), without cancellation; z is 0 for "apo_zero_unpaired".
        gains_B = self.beta * (ratios_B - divergence)
        good_B, bad_B = (
            self.desirable_weight * torch.sigmoid(-gains_B),
            self.undesirable_weight * torch.sigmoid(gains_B),
        )
        return torch.where(is_good_B, good_B, bad_B), self.beta * ratios_B.detach()


class RewardLoss:
    """The loss of a reward model: the negative log-probability that the chosen answer wins (Bradley-Terry).

    The loss of a pair is -log sigmoid(chosen - rejected - margin), where the margin is that of the rows' column
    `margin`, or 0.

    Args:
        center_weight: the weight of the squared sum of both scores, which keeps their mean at 0. 0 for none.

    Raises:
        TrainingError: FG917 if a setting is out of its range.

    Source:
        Ouyang et al. 2022; `center_weight`: Eisenstein et al. 2023. As `trl.RewardTrainer`.
    """

    trained_part = None
    """No token has a target of its own."""

    def __init__(self, *, center_weight: float = 0.0) -> None:
        refuse_wrong_values("preference_losses:RewardLoss", locals())
        self.center_weight = center_weight
        self.compute_metrics = RewardMetrics()

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule that applies this loss to batches.

        Raises:
            TrainingError: FG916 if the model does not give each sequence one score.
        """
        return ScoreRule(model, self)

    def score_losses(self, scores_P2: Tensor, margins_P: Tensor | None) -> Tensor:
        """Returns the loss of each pair.

        Args:
            scores_P2: the scores of the chosen and the rejected answers.
            margins_P: the least difference between them that is asked for; None for none.

        Shapes:
            scores_P2: (P, 2), margins_P: (P,). Returns (P,).
        """
        differences_P = scores_P2[:, 0] - scores_P2[:, 1]
        losses_P = -F.logsigmoid(differences_P if margins_P is None else differences_P - margins_P)
        return losses_P + self.center_weight * scores_P2.sum(dim=1) ** 2 if self.center_weight else losses_P


def _require_type(found: Any, known: tuple[str, ...], of: str) -> None:
    if found not in known:
        hint = nearest(str(found), known) or f"one of: {', '.join(known)}"
        raise _bad_setting("loss_type", found, f"is not a loss of {of}", hint)


def _bad_setting(name: str, value: Any, problem: str, hint: str) -> TrainingError:
    return TrainingError(f"{name} is {value!r}, which {problem}", code="FG917", hint=hint).about(f"loss_fn.{name}")
