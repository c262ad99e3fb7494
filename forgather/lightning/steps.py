"""The optimizer steps of a module: its `training_step` is the loss, and its hooks are called where Lightning's are.

The input is a scene and the windows of a run; the output is the loss of each step, and what is due after it. Each
micro-batch counts the same, whatever its rows: the loss of a step is the mean over micro-batches and ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.lightning.evaluation import evaluate_module
from forgather.lightning.hooks import takes, unsupported
from forgather.lightning.redirection import call_through
from forgather.lightning.scene import Scene
from forgather.lightning.schedules import ModuleSchedules
from forgather.lightning.train_data import LoaderBatches
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.trainer.loop import loss_divisor
from forgather.ml.trainer.run import Run
from forgather.ml.types import Update, Window
from forgather.value_text import shown

_log = get_logger(__name__)


class ModuleRule:
    """The loss rule of a module: each micro-batch is one target, and its loss is that of `training_step`.

    Args:
        steps: the steps of the run.
    """

    ignore_index: int | None = None
    label_kind: str | None = None

    def __init__(self, steps: ModuleSteps) -> None:
        self._steps = steps

    def prepared(self, batch: Any) -> Any:
        """Returns the batch."""
        return batch

    def count(self, batch: Any) -> float:
        """Returns 1: micro-batches count the same."""
        return 1.0

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the loss that `training_step` computes for a micro-batch.

        Shapes:
            Returns a scalar tensor.
        """
        return self._steps.micro_batch(model, batch)

    def total_and_output(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, Any]:
        """Refused: `validation_step` evaluates."""
        raise unsupported("a module is evaluated by its validation_step", "call the validate of its trainer")

    def output(self, model: Callable[..., Any], batch: Any) -> Any:
        """Refused: `predict_step` predicts."""
        raise unsupported("a module predicts by its predict_step", "call the predict of its trainer")


class ModuleSteps:
    """The optimizer steps of a module, with Lightning's hooks in Lightning's order.

    Args:
        scene: the scene.
        val_loaders: a function that returns the loaders of the validation data.
        train_loader: a function that returns the loader of the training data.
    """

    def __init__(self, scene: Scene, val_loaders: Callable[[], list[Any]], train_loader: Callable[[], Any]) -> None:
        self.scene = scene
        self.val_loaders, self.train_loader = val_loaders, train_loader
        self.data: LoaderBatches | None = None
        self.schedules: ModuleSchedules | None = None
        self.batches = self.all_batches = 0
        """The number of batches that were read, in this epoch and in all."""
        self._batch: Any = None
        self._output: Any = None
        self._has_loss = False
        self._due = False
        self._warned_of: set[str] = set()

    @property
    def optimizer(self) -> Any:
        """The optimizer of the run."""
        assert self.scene.strategy is not None  # noqa: S101
        return self.scene.strategy.optimizer

    @property
    def accumulated(self) -> int:
        """The number of micro-batches of the present optimizer step."""
        assert self.data is not None  # noqa: S101
        return self.data.accumulation.at(epoch=self.scene.epoch, step=self.scene.steps)

    # -- one optimizer step --------------------------------------------------------------------------------------------

    def micro_batch(self, engine: Any, batch: Any) -> Tensor:
        """Calls `training_step` for a micro-batch and the hooks before the backward pass; returns the loss.

        Args:
            engine: the module, or the wrapper that a strategy has put around it.
            batch: the batch, on the device.
        """
        scene, hooks, index = self.scene, self.scene.hooks, self.batches
        scene.values.begin_batch(batch)
        self._batch = batch
        if hooks.call("on_train_batch_start", batch, index) == -1:
            raise unsupported(
                "on_train_batch_start returned -1, which ends an epoch in Lightning",
                "set trainer.should_stop, or give limit_train_batches",
            )
        module: Any = scene.module
        args = (batch, index) if takes(module.training_step, "batch_idx") else (batch,)
        self._output = call_through(scene, "training_step", args, engine)
        loss = loss_of(self._output, scene)
        if index % self.accumulated == 0:
            hooks.call("on_before_zero_grad", self.optimizer)
        self._has_loss = loss is not None
        if loss is None:
            # No weight gets a gradient from it, as if there had been no backward pass.
            return torch.zeros((), requires_grad=True)
        hooks.call("on_before_backward", loss / self.accumulated)
        return loss

    def after_backward(self) -> None:
        """Calls the hook after the backward pass of a micro-batch."""
        if self._has_loss:
            self.scene.hooks.call("on_after_backward")

    def end_batch(self) -> None:
        """Calls the hooks at the end of a micro-batch, and takes what it has logged."""
        scene = self.scene
        scene.hooks.call("on_train_batch_end", self._outputs(), self._batch, self.batches)
        scene.take_metrics()
        scene.values.end_batch()
        self._batch = self._output = None
        self.batches += 1
        self.all_batches += 1

    def _outputs(self) -> Any:
        if not self._has_loss:
            return {}
        given = self._output if isinstance(self._output, Mapping) else {"loss": self._output}
        return {**given, "loss": given["loss"].detach() / self.accumulated}

    def window(self, run: Run, window: Window) -> tuple[float | Tensor | None, Update]:
        """Does one optimizer step; see `forgather.ml.trainer.loop.train_window`.

        Args:
            run: the run.
            window: its micro-batches.
        """
        if run.skips.covers(run.data.rows_of(window)):
            return None, Update(skipped=True)

        def between() -> None:
            self.after_backward()
            self.end_batch()
            run.after_micro_batch()

        divisor = loss_divisor(window.num_valid)
        share = run.strategy.forward_backward(window, denom=divisor, after_micro_batch=between)
        self.after_backward()
        loss = run.check_loss(share)
        if run.guard.bad is not None:
            run.strategy.discard()
            return None, Update(skipped=True)
        self.scene.hooks.call("on_before_optimizer_step", self.optimizer)
        if self.scene.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self.scene.module.parameters(), self.scene.clip_value)
        update = run.strategy.update(
            max_norm=run.args.max_grad_norm,
            want_norm=run.want_norm,
            before_step=run.before_update,
            after_step=run.after_update,
        )
        self._after_update(run)
        return loss if run.guard.bad is None else None, update

    def _after_update(self, run: Run) -> None:
        scene, schedules = self.scene, self.schedules
        assert schedules is not None and self.data is not None  # noqa: S101, PT018
        scene.steps += 1
        schedules.advance("step", self.batches + 1)
        if self.data.has_last:
            schedules.advance("epoch", scene.epoch + 1)
        self.end_batch()
        # Before the decisions below: validation is collective.
        scene.agree_to_stop()
        every = scene.log_every_n_steps
        if scene.limits.fast_dev_run or (every and scene.steps % every == 0) or scene.should_stop:
            scene.trainer.log_metrics({name: float(value) for name, value in scene.values.metrics().log.items()})
        self._due = self._validation_is_due()
        if self._due:
            run.session.control.should_evaluate = True
        else:
            self._end_step(run)

    def _end_step(self, run: Run) -> None:
        assert self.schedules is not None  # noqa: S101
        if any(config.reduce_on_plateau and config.interval == "step" for config in self.schedules.configs):
            self.schedules.advance("step", self.batches, self._metrics_of_main())
        if self.scene.should_stop and self.may_stop:
            run.session.control.should_training_stop = True

    @property
    def may_stop(self) -> bool:
        """Whether the run has done the least that `min_epochs` and `min_steps` ask for."""
        limits, scene = self.scene.limits, self.scene
        epochs = scene.epoch + bool(self.data is not None and self.data.has_last)
        return epochs >= (limits.min_epochs or 0) and scene.steps >= (limits.min_steps or 0)

    # -- validation ----------------------------------------------------------------------------------------------------

    @property
    def validates(self) -> bool:
        """Whether the run has validation data and a step for it."""
        return bool(self.val_loaders())

    def _validation_is_due(self) -> bool:
        limits, data = self.scene.limits, self.data
        assert data is not None  # noqa: S101
        every = limits.check_val_every_n_epoch
        if not self.validates or (every is not None and (self.scene.epoch + 1) % every):
            return False
        if self.scene.should_stop and self.may_stop:
            return True
        interval = self.check_interval()
        if interval is None:
            return data.has_last
        return (self.all_batches if every is None else self.batches) % interval == 0

    def check_interval(self) -> int | None:
        """Returns the number of batches after which validation runs; None for the end of the epoch.

        Raises:
            TrainingError: FG865 if it would run within an optimizer step.
        """
        limits, data = self.scene.limits, self.data
        assert data is not None  # noqa: S101
        interval, total = limits.val_check_interval, data.num_batches
        if isinstance(interval, float):
            if total is None and interval != 1.0:
                raise unsupported(
                    f"val_check_interval is {interval}, and the loader has no length", "give a number of batches"
                )
            batches = None if total is None else max(1, int(total * interval))
        else:
            batches = interval
            if total is not None and interval > total and limits.check_val_every_n_epoch is not None:
                raise unsupported(
                    f"val_check_interval is {interval}, and an epoch has {total} batches",
                    "give fewer batches, or check_val_every_n_epoch=None to count those of all epochs",
                )
        several = data.accumulation.largest
        if (
            batches is not None
            and batches != total
            and several > 1
            and (batches % several or data.accumulation.changes)
        ):
            raise unsupported(
                f"validation would run after {batches} batches, within an optimizer step of {several}",
                "give a val_check_interval that is a multiple of accumulate_grad_batches",
            )
        return batches

    def evaluate(self, run: Run) -> dict[str, float]:
        """Validates, and returns the metrics under the names that our loop looks for."""
        began = time.monotonic()
        self.scene.hooks.call_module("on_validation_model_zero_grad")
        evaluate_module(self.scene, self.val_loaders(), "validate")
        self.scene.agree_to_stop()
        followed = run.args.metric_for_best_model
        run_metrics = self._metrics_of_main(
            followed, *(getattr(one, "monitor", None) for one in run.session.dispatcher.callbacks)
        )
        # The line in the log by which our loop ranks checkpoints and knows that this step was evaluated.
        line = {"eval_runtime": round(time.monotonic() - began, 4)}
        if followed in run_metrics:
            line[f"eval_{followed.removeprefix('eval_')}"] = run_metrics[followed]
        run.session.log(line)
        run.session.control.should_evaluate = False
        run.session.send("on_evaluate", metrics=run_metrics | line)
        if self._due:
            self._due = False
            self._end_step(run)
        return run_metrics | line

    def _metrics_of_main(self, *followed: str | None) -> dict[str, float]:
        """Returns the newest metrics of the main process, by which every process decides. Collective.

        Args:
            *followed: the metrics, besides those of schedules, that decide: a warning says if the processes differ.
        """
        own = {name: float(value) for name, value in self.scene.trainer.callback_metrics.items()}
        every = collectives.all_gather(own)
        schedules = self.schedules.configs if self.schedules is not None else []
        for name in {*followed, *(config.monitor for config in schedules)} - {None} - self._warned_of:
            # As text: NaN is not equal to itself.
            if name is not None and len({str(of.get(name)) for of in every}) > 1:
                self._warned_of.add(name)
                if self.scene.trainer.is_global_zero:
                    _log.warning(
                        "the processes have different values of %r, and that of the main process counts: "
                        "log it with sync_dist=True",
                        name,
                    )
        return every[0]

    def sanity_check(self) -> None:
        """Tries some batches of the validation data before training; draws no random numbers of the run."""
        scene, most = self.scene, self.scene.limits.num_sanity_val_steps
        if not most or not self.validates:
            return
        state = capture_rng()
        scene.hooks.call_callbacks("on_sanity_check_start")
        evaluate_module(scene, self.val_loaders(), "sanity", most=None if most == -1 else most)
        scene.hooks.call_callbacks("on_sanity_check_end")
        scene.forget_metrics()
        restore_rng(state)

    # -- epochs --------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, batches: int) -> None:
        """Calls the hooks at the beginning of an epoch.

        Args:
            epoch: the number of the epoch.
            batches: the number of its batches that a run which resumes has trained on.
        """
        self.scene.epoch, self.batches = epoch, batches
        if not batches:
            self.scene.hooks.call("on_train_epoch_start")

    def end_epoch(self, *, is_whole: bool) -> bool:
        """Calls the hooks at the end of an epoch, steps the schedules that follow a metric; returns whether to stop.

        Args:
            is_whole: whether all batches were read.
        """
        scene, hooks = self.scene, self.scene.hooks
        assert self.schedules is not None  # noqa: S101
        scene.values.end_batches()
        hooks.call_callbacks("on_train_epoch_end", monitoring=False)
        hooks.call_module("on_train_epoch_end")
        hooks.call_callbacks("on_train_epoch_end", monitoring=True)
        found = scene.take_metrics()
        if is_whole and any(config.reduce_on_plateau for config in self.schedules.configs):
            self.schedules.advance("epoch", scene.epoch + 1, self._metrics_of_main())
        scene.trainer.log_metrics({name: float(value) for name, value in found.log.items()})
        scene.values.reset()
        stops = scene.agree_to_stop() and self.may_stop
        scene.epoch += 1
        return stops


def loss_of(output: Any, scene: Scene) -> Tensor | None:
    """Returns the loss in what `training_step` returned; None if the batch is left out.

    Args:
        output: a tensor, a mapping with "loss", or None.
        scene: the scene, whose number of ranks is read.

    Raises:
        TrainingError: FG865 if it is something else, or None on several ranks.
    """
    if output is None:
        assert scene.strategy is not None  # noqa: S101
        if scene.strategy.topology.world_size > 1:
            raise unsupported(
                "training_step returned None, and the other ranks would wait for its gradients",
                "return a loss that is 0 for all weights, such as 0 * loss",
            )
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a {type(output).__name__} without a loss" if isinstance(output, Mapping) else f"{shown(output, 60)}"
        raise unsupported(f"training_step returned {kind}", "return a tensor with one element, or {'loss': ...}")
    return loss.reshape(())
