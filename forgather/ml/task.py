"""The task of a training, which decides the metrics that are shown.

A metric without a known meaning is not shown: tokens are counted for language models only, and a perplexity is the
exponential of a mean token cross entropy in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from forgather.ml.losses import LossRule, is_causal_lm

_OTHER_LANGUAGE_MODELS = ("ForMaskedLM", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class Task:
    """The metrics that are meaningful for a training.

    Args:
        counts_tokens: report tokens per second; otherwise rows.
        has_perplexity: exp of an evaluation loss is a perplexity.
    """

    counts_tokens: bool = False
    has_perplexity: bool = False


def task_of(model: nn.Module, rule: LossRule) -> Task:
    """Returns the task of a model with a loss rule.

    Args:
        model: as it is trained, or on the meta device.
        rule: its loss rule.
    """
    # Other loss rules than those of `ml.losses` may lack the attribute.
    entropy = bool(getattr(rule, "is_token_entropy", False))
    of_tokens = is_causal_lm(model) or getattr(model, "loss_type", None) in _OTHER_LANGUAGE_MODELS
    return Task(counts_tokens=of_tokens, has_perplexity=entropy)
