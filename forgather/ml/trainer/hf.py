"""`HFTrainer`: `transformers.Trainer` with an optimizer, a schedule and a loss from a config.

`OutputLoss` turns a `loss_fn(logits, labels)` into the `compute_loss_func` that `transformers.Trainer` calls. It also
determines the divisor of the loss of an optimizer step, and the evaluation loss. The losses are then the same as with
`forgather.ml:Trainer`. With a plain `compute_loss_func`, transformers divides by the number of labels that are not
-100, even if the mean of the loss function divides by another number, and takes the mean of batch means as the
evaluation loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from forgather.errors import TrainingError
from forgather.ml.adapters import as_adapter
from forgather.ml.batch_sizes import num_rows
from forgather.ml.distributed.env import device_for_deepspeed_imports
from forgather.ml.label_kind import LabelCheck
from forgather.ml.log import get_logger
from forgather.ml.losses import (
    IGNORE_INDEX,
    UserLoss,
    is_causal_lm,
    logits_of,
    loss_rule,
    smoothing_without_token_loss,
)
from forgather.ml.model_class import class_name
from forgather.ml.model_inputs import ModelInputs
from forgather.ml.task import Task, task_of
from forgather.ml.trainer import argument_checks
from forgather.ml.trainer.collation import protecting_rows, warn_mixed_rows
from forgather.ml.trainer.model_setup import model_maker
from forgather.ml.trainer.row_fit import refuse_unfit_rows
from forgather.ml.trainer.transformers_run import TransformersRun
from forgather.rule_conditions import names_of


class OutputLoss:
    """A loss with the interface of the `compute_loss_func` argument of `transformers.Trainer`.

    Args:
        rule: the loss rule, which computes the sum of the loss and the count by which the mean divides.
    """

    def __init__(self, rule: UserLoss) -> None:
        self.rule = rule
        self._evaluation: _Evaluation | None = None

    def count(self, batches: list[Any], device: torch.device) -> Tensor:
        """Returns the divisor of the mean loss over micro-batches.

        The divisor is the number of targets, the sum of their class weights, or the number of elements.

        Args:
            batches: the micro-batches of one optimizer step.
            device: the device of the result.

        Shapes:
            Returns a scalar tensor.
        """
        found = sum(self.rule.count(batch) for batch in batches)
        return found.to(device) if isinstance(found, Tensor) else torch.tensor(found, device=device)

    @contextlib.contextmanager
    def evaluating(self, rows_that_count: Callable[[int], int], device: torch.device) -> Iterator[_Evaluation]:
        """Context manager that sums up the losses of an evaluation that runs in its body.

        Args:
            rows_that_count: a function that takes the number of rows of the current batch and returns how many of them
                are not padding.
            device: the device of the sums.
        """
        self._evaluation = _Evaluation(self.rule, rows_that_count, device)
        try:
            yield self._evaluation
        finally:
            self._evaluation = None

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Returns the contribution of a micro-batch to the loss of the optimizer step.

        Args:
            outputs: the model's outputs.
            labels: the labels of the micro-batch; None if the loss needs no labels.
            num_items_in_batch: the divisor of the whole optimizer step, see `count`. If it is None, the mean over this
                micro-batch is returned.

        Shapes:
            outputs: logits (B, ...), B rows; labels: (B, ...). Returns a scalar tensor.
        """
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
    """The sum of the losses of an evaluation, and the count by which the mean divides."""

    def __init__(self, rule: UserLoss, rows_that_count: Callable[[int], int], device: torch.device) -> None:
        self._rule = rule
        self._rows_that_count = rows_that_count
        # float32 sums of many batches would depend on how rows were batched; MPS has no float64.
        self.sums = torch.zeros(2, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)

    def add(self, logits: Tensor, labels: Tensor | None) -> None:
        """Adds the losses of a batch to the sums, without padding rows."""
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


# `transformers.TrainingArguments` accepts any value and fails later, far from the setting.
_RULES = argument_checks.rules("hf_trainer", "forgather.ml.trainer.hf:HFTrainer")
_INSIDE = "args.fsdp_config."

_log = get_logger(__name__)


class HFTrainer(TransformersRun):
    """A `transformers.Trainer` whose optimizer, schedule and loss can come from a config.

    Args:
        model: the model to train; None if the keyword argument `model_init` makes the model.
        args: the `transformers.TrainingArguments`.
        optimizer_factory: the optimizer factory, as in `forgather.ml:Trainer`; None uses `args.optim`.
        lr_scheduler_factory: the factory of the learning rate schedule, as in `forgather.ml:Trainer`; None uses
            `args.lr_scheduler_type`.
        loss_fn: the loss function, which is called with (logits, labels); None uses the model's own loss.
        callbacks: the callbacks. If there are any, they replace the progress bar and the printer of transformers, and
            speed and memory are added to the logs.
        adapter: the adapter that is put into the model, as in `forgather.ml:Trainer`.
        **others: the keyword arguments of `transformers.Trainer`.

    Raises:
        AdapterError: FG900 to FG905 or FG908 if the adapter cannot be put into the model.
        SettingError: FG810 to FG814 if a value in `args` is not allowed.
        TrainingError: FG812 if both `loss_fn` and `compute_loss_func` are given.
    """

    def __init__(
        self,
        model: nn.Module | None,
        args: TrainingArguments,
        *,
        optimizer_factory: Callable[..., Optimizer] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        adapter: Any = None,
        **others: Any,
    ) -> None:
        if (wanted := as_adapter(adapter)) is not None:
            make = model_maker(model, others.pop("model_init", None), args.seed, wanted)
            # `others` stays one mapping: the static check reads from it which arguments transformers takes.
            if model is None:
                others["model_init"] = make
            else:
                model = make()
        argument_checks.raise_first_error(
            _RULES.values({name: getattr(args, name.removeprefix("args.")) for name in _RULES.settings})
        )
        # Other rules ask for more than these facts.
        config = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
        names = {name for rule in _RULES.conflicts for name in names_of(rule["when"])}
        inside = {name: config.get(name.removeprefix(_INSIDE)) for name in names if name.startswith(_INSIDE)}
        kept = {"args.fsdp_config": args.fsdp_config, **inside}
        argument_checks.raise_first_error(one for one in _RULES.broken(kept, kept) if one.code == "FG814")
        _refuse_loss(loss_fn, args, others.get("compute_loss_func"))
        reduces = getattr(others.get("compute_metrics"), "preprocess_logits_for_metrics", None)
        if reduces is not None and others.get("preprocess_logits_for_metrics") is None:
            others["preprocess_logits_for_metrics"] = reduces
        self._inputs: ModelInputs | None = None
        events = self._prepare_run(args, optimizer_factory, lr_scheduler_factory, callbacks)
        # transformers may import DeepSpeed, which would search for an accelerator and print a warning.
        with device_for_deepspeed_imports():
            super().__init__(model=model, args=args, callbacks=events, **others)
        made = cast(nn.Module, self.model)  # transformers has called model_init by now
        self._loss: OutputLoss | None = None
        # The method `compute_loss` of a subclass, and a `compute_loss_func`, may take any labels.
        is_own = self.compute_loss_func is not None or type(self).compute_loss is not Trainer.compute_loss
        kind = None if is_own else getattr(loss_rule(made, loss_fn), "label_kind", None)
        self._labels = {name: LabelCheck(kind, class_name(made), name) for name in ("train_dataset", "eval_dataset")}
        if loss_fn is not None:
            self._loss = self.compute_loss_func = OutputLoss(UserLoss(made, loss_fn))
            if args.label_names is None:
                # transformers finds label columns among the parameters of `forward`, and drops a column that it does
                # not find.
                self.label_names = ["labels"]
        task = self._task()
        args.task = task  # type: ignore[attr-defined] # transformers' events have no field for it
        if not task.counts_tokens:
            args.include_num_input_tokens_seen = "no"
        self.data_collator = protecting_rows(self.data_collator, made)
        for rows in (self.train_dataset, self.eval_dataset):
            refuse_unfit_rows(made, rows)
            warn_mixed_rows(made, rows)
        self._finish_preparation(callbacks)

    def _task(self) -> Task:
        """Returns the task, which determines how metrics are named.

        The task has no perplexity if the evaluation loss is not a cross-entropy alone: transformers adds the loss of a
        mixture-of-experts router to the evaluation loss.
        """
        model = cast(nn.Module, self.model)
        if self._loss is not None:
            return task_of(model, self._loss.rule)
        smoothing = self.args.label_smoothing_factor if is_causal_lm(model) else 0.0
        task = task_of(model, loss_rule(model, label_smoothing=smoothing))
        adds_router = getattr(getattr(model, "config", None), "output_router_logits", False)
        is_own = self.compute_loss_func is not None
        return replace(task, has_perplexity=task.has_perplexity and not adds_router and not is_own)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Returns the micro-batches of an optimizer step and the divisor of its loss; counts the rows for the logs.

        Args:
            epoch_iterator: the iterator over the micro-batches of the epoch.
            num_batches: the number of micro-batches of the optimizer step.
            device: the device of the divisor.

        Shapes:
            The divisor is a scalar tensor. With torch's DataParallel its shape is (1, G), G devices.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_rows += sum(num_rows(batch) for batch in batches)
        return batches, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the inputs on the model's device, with arguments that stop attention at document boundaries."""
        model = cast(nn.Module, self.model)
        self._labels["train_dataset" if model.training else "eval_dataset"].add(inputs, IGNORE_INDEX)
        self._inputs = self._inputs or ModelInputs(model)
        return self._inputs.keywords(super()._prepare_inputs(inputs))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """Returns the divisor of the loss that belongs to `loss_fn`; transformers would return the number of labels."""
        if self._loss is None or not batch_samples:
            return super()._get_num_items_in_batch(batch_samples, device)
        count = self._loss.count(batch_samples, device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        count = count + (count == 0)  # an update whose labels are all ignored has the loss 0, not 0 / 0
        if self.args.n_gpu > 1:
            # torch's DataParallel splits tensors over devices, so each device gets an entry. The loss covers the
            # outputs of all devices, and transformers multiplies it by their number nonetheless.
            devices = self.args.n_gpu if self.args.average_tokens_across_devices else 1
            return (count * devices).reshape(1, 1).expand(self.args.n_gpu, -1)
        return count / (self.get_tp_size() * self.get_cp_size() * self.get_sp_size())

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Returns the result of `transformers.Trainer.evaluation_loop`, with a loss that does not depend on batch size.

        If there is a `loss_fn`, the mean loss over the whole set replaces the mean of batch means of transformers.

        Args:
            dataloader: the loader of the evaluation set.
            description: the description that transformers logs.
            prediction_loss_only: as in `transformers.Trainer.evaluation_loop`.
            ignore_keys: as in `transformers.Trainer.evaluation_loop`.
            metric_key_prefix: the prefix of the names of all metrics.
        """
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._loss is None:
            return super().evaluation_loop(*given)
        with self._loss.evaluating(self._rows_that_count, self.args.device) as evaluation:
            found = super().evaluation_loop(*given)
        total, count = self.accelerator.reduce(evaluation.sums).tolist()
        metrics: dict[str, float] = found.metrics or {}
        if f"{metric_key_prefix}_loss" in metrics and count:
            metrics[f"{metric_key_prefix}_loss"] = total / count
        return found

    def _rows_that_count(self, rows: int) -> int:
        """Returns how many of the `rows` rows of the current batch are not padding.

        Accelerate fills the last batch of an evaluation with repeated rows.
        """
        loader = self.accelerator.gradient_state
        if not loader.end_of_dataloader or loader.remainder <= 0:
            return rows
        own: int = loader.remainder - self.args.process_index * rows
        return min(max(own, 0), rows)


def _refuse_loss(loss_fn: Any, args: TrainingArguments, compute_loss_func: Any) -> None:
    """Raises an error if a loss function cannot be used by this trainer."""
    if loss_fn is not None and args.label_smoothing_factor:
        raise smoothing_without_token_loss(args.label_smoothing_factor)
    if hasattr(loss_fn, "loss_rule"):
        raise TrainingError(
            f"{type(loss_fn).__name__} needs a trainer of Forgather, and this one drives transformers.Trainer",
            code="FG916",
            hint="-- extends 'trainers/trainer.yaml', 'trainers/accel_trainer.yaml' or "
            "'trainers/pipeline_trainer.yaml'",
        ).about("loss_fn")
    if loss_fn is not None and compute_loss_func is not None:
        raise TrainingError(
            "the loss is given twice, as 'loss_fn' and as 'compute_loss_func'",
            code="FG812",
            hint="keep one of them",
        ).about("compute_loss_func")
