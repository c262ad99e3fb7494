"""Trainers that plans are made of: Forgather's own, and `transformers.Trainer` by its own `training_step`.

`planned_trainer` takes the object that a config trains with. It returns a trainer of Forgather as it is. For a
`transformers.Trainer`, it returns a trainer of Forgather with the same model, rows and sizes, which gives the batches;
its strategy calls `training_step`, the clipping, the optimizer and `prediction_step` of the given trainer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import has_length

from forgather.errors import PlanError
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.losses import IGNORE_INDEX, count_valid
from forgather.ml.strategy.base import Recipe, Strategy
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.strategy.topology import topology_of
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.predictions import leaves, nested
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.types import Evaluated, Update, Window

_SAME = (
    *("output_dir", "seed", "data_seed", "use_cpu", "num_train_epochs", "max_steps", "max_grad_norm", "bf16", "fp16"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "torch_compile"),
    *("label_smoothing_factor", "train_sampling_strategy", "remove_unused_columns"),
    *("dataloader_drop_last", "dataloader_num_workers"),
    *(
        "eval_strategy",
        "eval_steps",
        "eval_on_start",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
    ),
)
"""The settings that the batches and the plan depend on, which both kinds of arguments have."""

_METRICS = {
    "cuda": "set eval_accumulation_steps, the number of batches after which predictions are moved to the host, or "
    "batch_eval_metrics",
    "cpu": "set batch_eval_metrics: on a CPU, eval_accumulation_steps moves nothing",
}
_TRAINER = "plan the same model, rows and sizes with -- extends 'trainers/accel_trainer.yaml'"
_ANSWERS = (
    "plan the same model with -- extends 'tasks/chat.yaml' and rows as long as a prompt and max_completion_length: an "
    "update needs as much"
)


def planned_trainer(trainer: Any, device_type: str) -> Trainer:
    """Returns the trainer whose strategy is traced.

    Args:
        trainer: the object that a config trains with, such as a `Trainer` or an `HFTrainer`.
        device_type: the kind of device that is planned for, "cpu" or "cuda".

    Raises:
        PlanError: FG969 if the steps of the object cannot be traced.
    """
    if isinstance(trainer, Trainer):
        return trainer
    if not hasattr(trainer, "training_step") or not hasattr(trainer, "accelerator"):
        raise _untraced(trainer, "is not a trainer of Forgather or transformers", _TRAINER)
    if hasattr(trainer, "_generate_and_score_completions"):
        raise _untraced(trainer, "answers prompts in each step, as long as its weights make them", _ANSWERS)
    args = trainer.args
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name, None):
            raise _untraced(trainer, f"leaves args.{name} to Accelerate, which needs the devices", _TRAINER)
    moves = args.eval_accumulation_steps and device_type != "cpu"
    if _keeps_predictions(trainer) and not moves and not all(map(has_length, _evaluation_sets(trainer))):
        raise _untraced(trainer, "keeps the predictions of an evaluation set of unknown length", _METRICS[device_type])
    if args.device.type == "cpu":
        # Accelerate numbers CPUs, and to fake tensors "cpu:0" is another device than "cpu".
        args._setup_devices = trainer.accelerator.state.device = torch.device("cpu")
    return _StandIn(trainer, device_type)


def _keeps_predictions(trainer: Any) -> bool:
    """Returns whether an evaluation keeps the predictions of all rows for metrics, until they are moved to the host."""
    args = trainer.args
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    has_metrics = trainer.compute_metrics is not None and not args.prediction_loss_only
    return evaluates and has_metrics and not args.batch_eval_metrics and trainer.eval_dataset is not None


def _evaluation_sets(trainer: Any) -> list[Any]:
    sets = trainer.eval_dataset
    return list(sets.values()) if isinstance(sets, Mapping) else [sets]


def _untraced(trainer: Any, why: str, hint: str) -> PlanError:
    return PlanError(f"no plan can be made of {type(trainer).__name__}: it {why}", code="FG969", hint=hint).about(
        "main"
    )


def _recomputes(args: Any) -> bool:
    return bool(args.activation_checkpointing)


class _StandIn(Trainer):
    """A trainer with the model, the rows and the sizes of a `transformers.Trainer`, whose steps it does."""

    def __init__(self, trainer: Any, device_type: str) -> None:
        self._trainer, self._device_type = trainer, device_type
        same = {name: getattr(trainer.args, name) for name in _SAME}
        super().__init__(
            trainer.model,
            TrainingArguments(**same, gradient_checkpointing=_recomputes(trainer.args)),
            train_dataset=trainer.train_dataset,
            eval_dataset=trainer.eval_dataset,
            data_collator=trainer.data_collator,
            processing_class=trainer.processing_class,
            loss_fn=_Collated(),
        )

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns the strategy that does the steps of the given trainer."""
        return TransformersSteps(environment, self._trainer, self._device_type)


class _Collated:
    """A loss rule that leaves batches as they were collated: the given trainer shifts labels itself."""

    ignore_index = IGNORE_INDEX

    def loss_rule(self, model: nn.Module) -> Any:
        """Returns itself."""
        return self

    def prepared(self, batch: Any) -> Any:
        """Returns the batch."""
        return batch

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of valid targets in a batch."""
        return count_valid(batch.get("labels"), batch)


class TransformersSteps(ModelStrategy):
    """The strategy whose steps are those of a `transformers.Trainer`, on one process or replicated by DDP.

    Args:
        environment: the rank and the world size.
        trainer: the trainer.
        device_type: the kind of device that is planned for. What is moved from a CPU to the host stays where it is.

    Attributes:
        predictions: what the evaluation keeps of all batches so far, for metrics.
    """

    gradients_are_views = False

    def __init__(self, environment: DistributedEnvironment, trainer: Any, device_type: str) -> None:
        self._trainer, self._device_type = trainer, device_type
        self.predictions: list[Tensor] = []
        self.layout = Layout.for_world(environment.world_size)
        self.topology = topology_of(environment, self.layout, trainer.args.device)

    def build(self, recipe: Recipe) -> None:
        """Prepares the model as `transformers.Trainer.train` does before its loop."""
        super().build(replace(recipe, prepare=(), autocast=None))
        trainer = self._trainer
        trainer.model = trainer.model_wrapped = self.model
        if _recomputes(trainer.args):
            settings = dict(trainer.args.activation_checkpointing_kwargs or {})
            spread = {name: settings.pop(name) for name in ("every_n_layers", "offload") if name in settings}
            model: Any = self.model
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings or None, **spread)

    def build_optimizer(self) -> Optimizer:
        """Makes the optimizer as the trainer does, and has Accelerate prepare both."""
        trainer = self._trainer
        # DDP's reducer reads the addresses of weights, which have none. The planner adds its buckets.
        prepare = trainer.accelerator.prepare_model
        trainer.accelerator.prepare_model = lambda model, **given: prepare(model, **{**given, "evaluation_mode": True})
        self.engine, _ = trainer._prepare_for_training(1, None, None)
        self.optimizer = trainer.optimizer.optimizer
        return self.optimizer

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window by `training_step`, and returns the sum of its losses."""
        trainer, last = self._trainer, len(window.batches) - 1
        count = trainer._get_num_items_in_batch(window.batches, trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(window.batches)
        total = torch.zeros((), device=self.topology.device)
        for position, batch in enumerate(window.batches):
            trainer.accelerator.gradient_state._set_sync_gradients(position == last)
            total = total + trainer.training_step(self.engine, dict(batch), count)
            if after_micro_batch is not None and position != last:
                after_micro_batch()
        return total

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
        squares: Tensor | None = None,
    ) -> Update:
        """Clips the gradients, steps the optimizer and zeroes the gradients, as the trainer does."""
        trainer = self._trainer
        norm = trainer._clip_grad_norm(self.engine) if max_norm > 0 else None
        norm = trainer._get_grad_norm(self.engine, grad_norm=norm)
        trainer.optimizer.step()
        self.engine.zero_grad()
        return Update(grad_norm=norm)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Evaluated:
        """Returns what `prediction_step` returns for a batch, the last one of the largest set."""
        self._leave_training()
        with contextlib.suppress(AttributeError):
            self._trainer.optimizer.eval()
        loss, found = self._predicted(batch)
        if not _keeps_predictions(self._trainer):
            return Evaluated(loss, self.rule.count(batch), found[0])
        kept = nested(lambda one: one.new_empty(self._rows_before(), *one.shape[1:]), found)
        loss, found = self._predicted(batch)
        self.predictions += leaves((kept, nested_concat(kept, found), found))  # type: ignore[no-untyped-call]
        return Evaluated(loss, self.rule.count(batch), found[0])

    def _predicted(self, batch: Any) -> tuple[Any, Any]:
        """Returns the loss of a batch, and its predictions and labels on all processes."""
        trainer, world_size = self._trainer, self.topology.world_size
        only_loss = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        loss, logits, labels = trainer.prediction_step(self.engine, dict(batch), only_loss)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        found = tuple(one for one in (logits, labels) if one is not None) or (None,)
        if world_size > 1 and found[0] is not None:
            found = nested(lambda one: one.new_empty(world_size * one.shape[0], *one.shape[1:]), found)
        return loss, found

    def _rows_before(self) -> int:
        """Returns how many rows have predictions on the device before the last batch of the largest set."""
        args = self._trainer.args
        rows = int(args.per_device_eval_batch_size) * self.topology.world_size
        # A stream has as many batches as are kept, for `planned_trainer` refuses one whose batches are all kept.
        batches = max(-(-len(one) // rows) if has_length(one) else math.inf for one in _evaluation_sets(self._trainer))
        if args.eval_accumulation_steps and self._device_type != "cpu":
            batches = min(batches, args.eval_accumulation_steps)
        return int(batches - 1) * rows
