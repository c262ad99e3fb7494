"""What the numbers of a training mean.

Takes a model and its loss rule; gives a `Task`. Keeps true: a figure whose meaning is not known is not shown. Tokens
are counted of language models alone, and a perplexity is that of a mean token cross entropy in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from forgather.ml.losses import LossRule, is_causal_lm

_OTHER_LANGUAGE_MODELS = ("ForMaskedLM", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class Task:
    """What the numbers of a training mean.

    Args:
        counts_tokens: speed is that of tokens; of rows otherwise.
        has_perplexity: exp of an evaluation loss is a perplexity.
    """

    counts_tokens: bool = False
    has_perplexity: bool = False


def task_of(model: nn.Module, rule: LossRule) -> Task:
    """Returns what the numbers of a training mean.

    Args:
        model: as it is trained, or without memory.
        rule: its loss rule.
    """
    entropy = bool(getattr(rule, "is_token_entropy", False))
    of_tokens = is_causal_lm(model) or getattr(model, "loss_type", None) in _OTHER_LANGUAGE_MODELS
    return Task(counts_tokens=of_tokens, has_perplexity=entropy)
