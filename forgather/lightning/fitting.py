"""Training of a module by our loop, with our strategies, accounting, checkpoints and resuming.

The input is the steps of a module and the settings of a run; the output is a trainer of ours. The random numbers that a
run draws are those that Lightning would draw.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from forgather.errors import TrainingError
from forgather.interrupt import Interrupt
from forgather.lightning.hooks import unsupported
from forgather.lightning.scene import limit_of
from forgather.lightning.schedules import ModuleSchedules, read_optimizers
from forgather.lightning.steps import ModuleRule, ModuleSteps
from forgather.lightning.train_data import LoaderBatches
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.strategy.base import Recipe
from forgather.ml.trainer import run_start
from forgather.ml.trainer.accel import AccelTrainer
from forgather.ml.trainer.run import Run
from forgather.ml.trainer.trainer import Trainer as OneProcessTrainer


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
            topology = self.strategy.topology
            self.steps.data = LoaderBatches(loader, limit, self.args, topology=topology, metrics=self.steps.scene)
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
        scene.trainer.write_requested()
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
        scene.trainer.write_requested()

    def _end_epoch(self, run: Run) -> None:
        if self.steps.end_epoch(is_whole=self.prepare_data().has_last):
            run.session.control.should_training_stop = True
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


class ModuleAccelLoop(ModuleLoop, AccelTrainer):
    """`ModuleLoop` on several processes."""
