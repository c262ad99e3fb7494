"""`DenoisingLoss`: the mean squared difference between what a model predicts and the target of noised latents.

Takes batches of rows of `NoisedRows`: the arguments of the model, and the target as `labels`. Gives the sum of the
losses of the rows, and their number, so the sums of micro-batches and ranks can be added.

Shapes:
    B rows; predictions and targets are (B, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.batch_sizes import num_rows
from forgather.ml.losses import BaseLossRule, LossRule, at_least_float32, labels_of


class DenoisingLoss:
    """The loss of a model that predicts noise, or the direction from latents to noise.

    The loss of a row is the mean of the squared differences over its elements. The target, which the rows have, depends
    on the noise scheduler of the pipeline.

    Source:
        The training scripts of diffusers, with equal weights for all timesteps.
    """

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule that applies this loss to batches."""
        return DenoisingRule(model)


class DenoisingRule(BaseLossRule):
    """The rule of `DenoisingLoss`.

    Args:
        model: a model of diffusers, with or without an adapter.
    """

    ignore_index: int | None = None

    def _count(self, batch: Any) -> float | Tensor:
        return num_rows(batch)

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        target = labels_of(batch)
        if target is None or not target.is_floating_point():
            raise TrainingError(
                "the batch has no target of noised latents",
                code="FG980",
                hint="take train_dataset: forgather.ml.diffusion:NoisedRows with data_collator: "
                "torch.utils.data:default_collate, as tasks/text_to_image.yaml does",
            ).about("train_dataset")
        found = self._inputs.call(model, batch)[0]
        squared: Tensor = (at_least_float32(found) - at_least_float32(target)) ** 2
        return squared.flatten(1).mean(dim=1).sum()
