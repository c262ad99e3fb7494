"""The task that a model is trained for, which determines the metrics that are shown.

A metric is shown only if it is meaningful for the task: tokens per second are reported for language models only, and a
perplexity only if the evaluation loss is a mean token cross entropy in nats.
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
        counts_tokens: True if the speed is reported in tokens per second; False if it is reported in rows.
        has_perplexity: True if the exponential of an evaluation loss is a perplexity.
    """

    counts_tokens: bool = False
    has_perplexity: bool = False


def task_of(model: nn.Module, rule: LossRule) -> Task:
    """Returns the task of a model that is trained with a loss rule.

    Args:
        model: the model, which may be on the meta device.
        rule: the loss rule, which determines how labels are shifted and which label value is ignored.
    """
    # Other loss rules than those of `ml.losses` may lack the attribute.
    entropy = bool(getattr(rule, "is_token_entropy", False))
    of_tokens = is_causal_lm(model) or getattr(model, "loss_type", None) in _OTHER_LANGUAGE_MODELS
    return Task(counts_tokens=of_tokens, has_perplexity=entropy)
