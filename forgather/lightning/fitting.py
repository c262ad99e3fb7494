"""Training of a module by our loop: its `training_step` is the loss, and its hooks are called where Lightning's are.

The input is a scene and the settings of a run; the output is a trainer of ours, whose strategy, accounting, checkpoints
and resuming are those of all runs. Each micro-batch counts the same, whatever its rows: the loss of a step is the mean
over micro-batches and ranks. The random numbers that a run draws are those that Lightning would draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.interrupt import Interrupt
from forgather.lightning.evaluation import evaluate_module
from forgather.lightning.hooks import takes, unsupported
from forgather.lightning.redirection import call_through
from forgather.lightning.scene import Scene, limit_of
from forgather.lightning.schedules import ModuleSchedules, read_optimizers
from forgather.lightning.train_data import LoaderBatches
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.strategy.base import Recipe
from forgather.ml.trainer import run_start
from forgather.ml.trainer.accel import AccelTrainer
from forgather.ml.trainer.loop import loss_divisor
from forgather.ml.trainer.run import Run
from forgather.ml.trainer.trainer import Trainer as OneProcessTrainer
from forgather.ml.types import Update, Window


class ModuleRule:
    """The loss rule of a module: each micro-batch is one target, and its loss is that of `training_step`.

    Args:
        steps: the steps of the run.
    """

    ignore_index = None
    label_kind = None

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
            self.schedules.advance("step", self.batches, self.scene.trainer.callback_metrics)
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
        run_metrics: dict[str, float] = {}
        self.scene.hooks.call_module("on_validation_model_zero_grad")
        evaluate_module(self.scene, self.val_loaders(), "validate")
        for name, value in self.scene.trainer.callback_metrics.items():
            run_metrics[name] = float(value)
        followed = run.args.metric_for_best_model
        # The line in the log by which our loop ranks checkpoints and knows that this step was evaluated.
        line = {"eval_runtime": 0.0}
        if followed in run_metrics:
            line[f"eval_{followed.removeprefix('eval_')}"] = run_metrics[followed]
        run.session.log(line)
        run.session.control.should_evaluate = False
        run.session.send("on_evaluate", metrics=run_metrics | line)
        if self._due:
            self._due = False
            self._end_step(run)
        return run_metrics | line

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

    def end_epoch(self, *, is_whole: bool) -> None:
        """Calls the hooks at the end of an epoch, and steps the schedules that follow a metric.

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
            self.schedules.advance("epoch", scene.epoch + 1, scene.trainer.callback_metrics)
        scene.trainer.log_metrics({name: float(value) for name, value in found.log.items()})
        scene.values.reset()
        scene.epoch += 1


class ModuleLoop(OneProcessTrainer):
    """The part of our trainers that a module replaces: loss, optimizer, data and the hooks of the loop.

    Args:
        steps: the steps of the run.
        **given: the arguments of the trainer.
    """

    def __init__(self, steps: ModuleSteps, **given: Any) -> None:
        self.steps = steps
        self._is_resumed = False
        self._before = capture_rng()
        super().__init__(steps.scene.module, **given)
        steps.scene.strategy = self.strategy

    def _recipe(self, *args: Any) -> Recipe:
        return dataclasses.replace(
            super()._recipe(*args),
            make_rule=lambda model: ModuleRule(self.steps),
            make_optimizer=lambda model: self._optimizer(),
        )

    def _optimizer(self) -> Any:
        module: Any = self.steps.scene.module
        optimizer, configs = read_optimizers(module.configure_optimizers())
        self.steps.schedules = ModuleSchedules(optimizer, configs)
        return optimizer

    def prepare_data(self) -> LoaderBatches:
        """Returns the training batches, which are opened once: this draws random numbers, as in Lightning."""
        if self.steps.data is None:
            limit, _ = limit_of(self.steps.scene.limits, "train")
            loader = self.steps.train_loader()
            self.steps.data = LoaderBatches(loader, limit, self.args, topology=self.strategy.topology)
            self.steps.check_interval()
            if not self._is_resumed:
                self.steps.data.open()
        return self.steps.data

    @property
    def num_steps(self) -> tuple[int, int]:
        """The number of optimizer steps and of epochs of the run."""
        data, limits = self.prepare_data(), self.steps.scene.limits
        steps, epochs = run_start.num_steps_and_epochs(self.args, data)  # type: ignore[arg-type]
        if limits.max_epochs is not None and data.num_batches is not None:
            most = data.accumulation.num_steps(data.num_batches, limits.max_epochs)
            steps, epochs = min(steps, most), min(epochs, limits.max_epochs)
        return steps, epochs

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Trains the module; see `forgather.ml.Trainer.train`.

        Args:
            resume_from_checkpoint: the checkpoint to resume from.
        """
        self._is_resumed = resume_from_checkpoint is not None
        return super().train(resume_from_checkpoint)

    def _make_run(self, interrupt: Interrupt) -> Run:
        scene = self.steps.scene
        scene.stage = "train"
        # Our trainers seed the process; a module goes on with the numbers that its script has drawn.
        restore_rng(self._before)
        optimizer = self.strategy.build_optimizer()
        self.lr_scheduler = self.steps.schedules
        if not self._is_resumed:
            self._begin()
        data = self.prepare_data()
        self._before = capture_rng()
        steps, epochs = self.num_steps
        topology = self.strategy.topology
        state = self._session.state = TrainerState(
            max_steps=steps,
            num_train_epochs=epochs,
            train_batch_size=data.share.rows,
            is_world_process_zero=topology.is_writer,
            is_local_process_zero=topology.local_rank == 0,
        )
        state.compute_steps(self.args, steps)  # type: ignore[no-untyped-call]
        self._session.dispatcher.scene |= {
            "optimizer": optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": data.loader,
            "eval_dataloader": None,
        }
        run: Run
        run = Run(
            self._session,
            self.strategy,
            data,  # type: ignore[arg-type]
            self.lr_scheduler,
            evaluate=lambda wants_end: self.steps.evaluate(run),
            interrupt=interrupt,
            storage=self.storage,
            save_function=self.save_function,
        )
        self.run = run
        return run

    def _begin(self) -> None:
        self.steps.scene.hooks.call("on_fit_start")
        # Lightning tries the validation data before a run that goes on at the end of an epoch, too.
        if not self._is_resumed or (self.steps.data is not None and self.steps.data.batch == 0):
            self.steps.sanity_check()

    def log_values(self, values: dict[str, float]) -> None:
        """Gives metrics of the module to the log and the trackers of the run.

        Args:
            values: the metrics, by name.
        """
        self._session.log(values)

    def rows_line(self, run: Run) -> str:
        """Returns the line about the batches of a run, which is logged at its beginning."""
        batches = run.data.num_batches
        return f"batches    {'an unknown number' if batches is None else f'{batches:,}'} per epoch and rank"

    def loop(self, run: Run) -> None:
        """Does the optimizer steps of the run, with the hooks of the module and of its callbacks."""
        steps, scene, data = self.steps, self.steps.scene, self.prepare_data()
        scene.steps, scene.epoch = run.session.state.global_step, data.epoch
        if self._is_resumed:
            self._begin()
        else:
            restore_rng(self._before)
        steps.all_batches = data.epoch * (data.num_batches or 0) + data.batch
        scene.hooks.call("on_train_start")
        if data.at_end_of_epoch:
            # The checkpoint was written at the last step of an epoch, before its hooks.
            steps.batches, data.has_last = data.batch, True
            self._end_epoch(run)
        run.end_resumed_step()
        most = scene.limits.max_epochs
        # The number of steps does not end a run after epochs of unknown length.
        while not run.finished and (most is None or data.epoch < most):
            complete = True
            steps.begin_epoch(data.epoch, data.batch)
            for window in run.begin_epoch():
                run.begin_step()
                loss, update = steps.window(run, window)
                if run.guard.bad is not None:
                    raise _no_skips()
                run.finish_step(loss, update, window)
                scene.trainer.write_requested()
                if run.step_ends_epoch:
                    complete = data.at_end_of_epoch or run.session.control.should_epoch_stop
                    break
            self._end_epoch(run)
            run.finish_epoch(complete=complete)
            scene.trainer.write_requested()
        scene.hooks.call("on_train_end")

    def _end_epoch(self, run: Run) -> None:
        self.steps.end_epoch(is_whole=self.prepare_data().has_last)
        # Without validation, the metrics of the epoch are those that checkpoints and callbacks compare.
        if not self.steps.validates and (
            self.args.metric_for_best_model is not None or self._session.dispatcher.listeners("on_evaluate")
        ):
            run.session.control.should_evaluate = True


def _no_skips() -> TrainingError:
    return unsupported(
        "a step of a module was bad, and bad_step_policy is not stop",
        "remove bad_step_policy: the hooks of a skipped step are not undone",
    )


class ModuleAccelLoop(ModuleLoop, AccelTrainer):  # type: ignore[misc]
    """`ModuleLoop` on several processes."""


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
        kind = f"a {type(output).__name__} without a loss" if isinstance(output, Mapping) else f"{output!r:.60}"
        raise unsupported(f"training_step returned {kind}", "return a tensor with one element, or {'loss': ...}")
    return loss.reshape(())
