"""`transformers.Trainer`, driven by what drives our own trainer.

Takes the keywords of `forgather.ml:Trainer` with the arguments of transformers; gives a
`transformers.Trainer`. Keeps true: without factories, loss and callbacks it is `transformers.Trainer` to
the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from forgather.ml.callbacks.speed import SpeedCallback
from forgather.ml.losses import UserLoss, is_causal_lm
from forgather.ml.trainer.optimizers import make_optimizer, make_schedule


class HFTrainer(Trainer):
    """A `transformers.Trainer` whose optimizer, schedule and loss may come from a config.

    Args:
        model: what is trained.
        args: `transformers.TrainingArguments`.
        optimizer_factory: as in `forgather.ml:Trainer`; None takes `args.optim`.
        lr_scheduler_factory: as in `forgather.ml:Trainer`; None takes `args.lr_scheduler_type`.
        loss_fn: called with (logits, labels); None takes the model's own loss.
        callbacks: they stand in for the progress bar and printer of transformers; speed and memory join their logs.
        **others: keywords of `transformers.Trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        optimizer_factory: Callable[..., Optimizer] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **others: Any,
    ) -> None:
        self._optimizer_factory = optimizer_factory
        self._scheduler_factory = lr_scheduler_factory
        if loss_fn is not None:
            others["compute_loss_func"] = _OutputLoss(UserLoss(loss_fn, causal=is_causal_lm(model)))
        super().__init__(
            model=model, args=args, callbacks=[SpeedCallback(), *callbacks] if callbacks else None, **others
        )
        if callbacks:
            self.remove_callback(PrinterCallback)
            self.remove_callback(ProgressCallback)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Returns the factory's optimizer, or that of transformers."""
        if self.optimizer is None and self._optimizer_factory is not None:
            trained = cast(nn.Module, self.model if model is None else model)
            self.optimizer = make_optimizer(trained, self.args, self._optimizer_factory)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Returns the factory's schedule, or that of transformers."""
        if self.lr_scheduler is None and self._scheduler_factory is not None:
            scheduled = cast(Optimizer, self.optimizer if optimizer is None else optimizer)
            self.lr_scheduler = make_schedule(scheduled, self.args, num_training_steps, self._scheduler_factory)
        return super().create_scheduler(num_training_steps, optimizer)


class _OutputLoss:
    """A loss of logits and labels, in the form in which `transformers.Trainer` calls one."""

    def __init__(self, rule: UserLoss) -> None:
        self._rule = rule

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        batch = {"labels": labels}
        denom = self._rule.count(batch) if num_items_in_batch is None else num_items_in_batch
        return self._rule.total(lambda: outputs, batch, denom=denom) / denom
