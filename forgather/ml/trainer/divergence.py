"""The divergence from the reference that KTO needs: one number for all rows of an optimizer step or evaluation set.

Takes the batches of a step or a set; gives them with the estimate, which is the same on every rank. It costs one
forward pass without gradients per batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from forgather.ml.feedback_rule import DIVERGENCE, FeedbackRule
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.trainer.batch_sampler import PreparedBatch
from forgather.ml.trainer.predictions import nested, whole_tensor
from forgather.ml.types import PaddingBatch, Window


def window_with_divergence(strategy: Strategy, window: Window) -> Window:
    """Returns a window whose batches have the estimate, or the window itself if the loss needs none.

    Collective: every rank must call it.

    Args:
        strategy: the strategy, whose model is compared with the reference.
        window: the micro-batches of one optimizer step.
    """
    if not getattr(strategy.rule, "estimates_divergence", False):
        return window
    found = _estimated(strategy, window.batches)
    return dataclasses.replace(window, batches=[_with(batch, found) for batch in window.batches])


def batches_with_divergence(strategy: Strategy, read: Callable[[], Iterator[PreparedBatch]]) -> Iterator[PreparedBatch]:
    """Returns the batches of an evaluation set with the estimate over the set, if the loss needs one.

    Collective: every rank must call it.

    Args:
        strategy: the strategy, whose model is compared with the reference.
        read: a function that returns the batches from the beginning. It is called twice if the loss needs an estimate.
    """
    if not getattr(strategy.rule, "estimates_divergence", False):
        return read()
    found = _estimated(strategy, (ready.batch for ready in read()))
    return (ready._replace(batch=_with(ready.batch, found)) for ready in read())


@torch.no_grad()
def _estimated(strategy: Strategy, batches: Iterable[Any]) -> Tensor:
    rule, device = strategy.rule, strategy.topology.device
    assert isinstance(rule, FeedbackRule), "only this rule needs an estimate"  # noqa: S101
    sums = torch.zeros(2, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    with restored_train_modes(strategy.model):
        for batch in batches:
            # Of a padding batch the forward pass alone: every rank takes part in it.
            inner = batch.batch if isinstance(batch, PaddingBatch) else batch
            found = rule.divergence_sums(
                lambda part: nested(whole_tensor, strategy.predict(part)), to_device(inner, device)
            )
            if found is not None and inner is batch:
                sums += found
    whole: Tensor = strategy.reduce(sums)
    total, count = whole.unbind()
    return (total / count.clamp(min=1)).clamp(min=0)


def _with(batch: Any, divergence: Tensor) -> Any:
    if isinstance(batch, PaddingBatch):
        return PaddingBatch(_with(batch.batch, divergence))
    return {**batch, DIVERGENCE: divergence}
