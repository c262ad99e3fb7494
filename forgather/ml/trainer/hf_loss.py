"""A loss of logits and labels under `transformers.Trainer`.

Takes the rule of a `loss_fn`; gives the function that `transformers.Trainer` calls, the number that an update is
divided by, and the loss of an evaluation. Keeps true: the numbers are those of our own trainer. transformers divides by
the labels that are not -100, whatever a mean of the loss divides by, and evaluates a mean of the means of batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from forgather.ml.losses import UserLoss, logits_of


class OutputLoss:
    """A loss in the form in which `transformers.Trainer` calls one: `compute_loss_func`.

    Args:
        rule: what the loss sums, and what its mean divides by.
    """

    def __init__(self, rule: UserLoss) -> None:
        self.rule = rule
        self._evaluation: _Evaluation | None = None

    def count(self, batches: list[Any], device: torch.device) -> Tensor:
        """Returns what the mean over micro-batches divides by: targets, their class weights, or elements."""
        found = sum(self.rule.count(batch) for batch in batches)
        return found.to(device) if isinstance(found, Tensor) else torch.tensor(found, device=device)

    @contextlib.contextmanager
    def evaluating(self, rows_that_count: Callable[[int], int], device: torch.device) -> Iterator[_Evaluation]:
        """Adds up the losses of the batches of an evaluation.

        Args:
            rows_that_count: how many of the rows of the present batch are no repetition of rows before.
            device: where sums are kept.
        """
        self._evaluation = _Evaluation(self.rule, rows_that_count, device)
        try:
            yield self._evaluation
        finally:
            self._evaluation = None

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Returns the share of a micro-batch in the loss of its update."""
        logits = logits_of(outputs)
        if self._evaluation is not None:
            self._evaluation.add(logits, labels)
        batch = _batch(logits, labels)
        denom: Any = self.rule.count(batch) if num_items_in_batch is None else num_items_in_batch
        if isinstance(denom, Tensor) and denom.ndim:  # torch's DataParallel: one entry a device, all of them the same
            denom = denom.flatten()[0]
        share: Tensor = self.rule.total(lambda **_: logits, batch, denom=denom) / denom
        return share


class _Evaluation:
    """The losses of an evaluation, and what their mean divides by."""

    def __init__(self, rule: UserLoss, rows_that_count: Callable[[int], int], device: torch.device) -> None:
        self._rule = rule
        self._rows_that_count = rows_that_count
        # Sums of many batches lose digits in float32, and then depend on how rows were batched.
        self.sums = torch.zeros(2, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)

    def add(self, logits: Tensor, labels: Tensor | None) -> None:
        """Adds the rows of a batch that count."""
        rows = self._rows_that_count(logits.shape[0])
        if rows == 0:
            return
        logits, labels = logits[:rows], None if labels is None else labels[:rows]
        batch = _batch(logits, labels)
        count = self._rule.count(batch)
        self.sums[0] += self._rule.total(lambda **_: logits, batch, denom=count).detach()
        self.sums[1] += count


def _batch(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    return {"logits": logits} if labels is None else {"labels": labels}
