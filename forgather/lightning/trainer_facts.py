"""What modules and callbacks read of a trainer, under Lightning's names: progress, metrics, processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.lightning.evaluation import num_batches
from forgather.lightning.fitting import ModuleLoop
from forgather.lightning.hooks import unsupported
from forgather.lightning.scene import Scene
from forgather.lightning.schedules import ScheduleConfig
from forgather.lightning.stage_data import StageData
from forgather.lightning.steps import ModuleSteps
from forgather.lightning.trainer_words import Limits, TrainerWords
from forgather.ml.distributed import collectives
from forgather.ml.distributed.env import process_facts


class TrainerFacts:
    """The attributes of a trainer that modules and callbacks read; `Trainer` sets what they are read from."""

    words: TrainerWords
    _limits: Limits
    _given: Sequence[Any]
    _scene: Scene | None = None
    _steps: ModuleSteps | None = None
    _loop: ModuleLoop | None = None
    _data: StageData | None = None

    @property
    def lightning_module(self) -> Any:
        """The module, or None."""
        return None if self._scene is None else self._scene.module

    @property
    def datamodule(self) -> Any:
        """The data module, or None."""
        return None if self._data is None else self._data.datamodule

    @property
    def is_global_zero(self) -> bool:
        """True on the main process."""
        return process_facts().rank == 0

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return process_facts().rank

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this machine."""
        return process_facts().local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return process_facts().world_size

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, from 0; after `fit`, the number of epochs."""
        return 0 if self._scene is None else self._scene.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps that are done."""
        return 0 if self._scene is None else self._scene.steps

    @property
    def max_epochs(self) -> int:
        """The number of epochs after which a run ends; -1 if its steps alone end it."""
        return -1 if self._limits.max_epochs is None else self._limits.max_epochs

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps after which a run ends; -1 if its epochs alone end it."""
        return self._limits.max_steps

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of micro-batches of the present optimizer step."""
        return self._steps.accumulated if self._steps is not None and self._steps.data is not None else 1

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after the present step."""
        return self._scene is not None and self._scene.should_stop

    @should_stop.setter
    def should_stop(self, wanted: bool) -> None:
        if self._scene is None:
            raise _before_fit("should_stop is set")
        self._scene.should_stop = wanted

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest metrics, by name, for callbacks and schedules."""
        found: dict[str, Tensor] = self._metrics().callback
        return found

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest metrics, by name, that trackers get."""
        found: dict[str, Tensor] = self._metrics().log
        return found

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest metrics, by name, that were logged with `prog_bar`."""
        found: dict[str, float] = self._metrics().bar
        return found

    def _metrics(self) -> Any:
        scene = self._scene
        if scene is None:
            raise _before_fit("metrics are read")
        if scene.stage:
            scene.take_metrics()
        return scene.metrics

    @property
    def optimizers(self) -> list[Any]:
        """A list of the optimizer."""
        return [] if self._loop is None or self._loop.strategy.optimizer is None else [self._loop.strategy.optimizer]

    @property
    def lr_scheduler_configs(self) -> list[ScheduleConfig]:
        """The learning rate schedules and their intervals."""
        schedules = None if self._steps is None else self._steps.schedules
        return [] if schedules is None else schedules.configs

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of optimizer steps of the run."""
        if self._loop is None:
            raise _before_fit("estimated_stepping_batches is read")
        return self._loop.num_steps[0]

    @property
    def num_training_batches(self) -> int | float:
        """The number of training batches of an epoch; infinite if it is unknown."""
        if self._loop is None:
            raise _before_fit("num_training_batches is read")
        found = self._loop.prepare_data().num_batches
        return float("inf") if found is None else found

    @property
    def num_val_batches(self) -> list[int | None]:
        """The number of batches of each loader of the validation data."""
        if self._scene is None or self._data is None:
            raise _before_fit("num_val_batches is read")
        return num_batches(self._scene, self._data.loaders("validate"), "validate")

    @property
    def training(self) -> bool:
        """True while a module trains."""
        return self._scene is not None and self._scene.stage == "train"

    @property
    def validating(self) -> bool:
        """True while a module is validated."""
        return self._scene is not None and self._scene.stage == "validate"

    @property
    def sanity_checking(self) -> bool:
        """True while validation is tried before training."""
        return self._scene is not None and self._scene.stage == "sanity"

    @property
    def testing(self) -> bool:
        """True while a module is tested."""
        return self._scene is not None and self._scene.stage == "test"

    @property
    def predicting(self) -> bool:
        """True while a module predicts."""
        return self._scene is not None and self._scene.stage == "predict"

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks: those with Lightning's hooks, and those of our trainers."""
        return list(self._given)

    logger = None
    loggers: Sequence[Any] = ()
    barebones = False

    @property
    def default_root_dir(self) -> str:
        """The folder of the run."""
        return str(self.words.settings.get("output_dir", "trainer_output"))

    def gathered(self, data: Tensor) -> Tensor:
        """Returns the tensors of all processes, stacked; in a single process, the tensor. Collective."""
        if not collectives.is_multi_process():
            return data
        return torch.stack(
            [torch.as_tensor(one).to(data.device) for one in collectives.all_gather(data.detach().cpu())]
        )

    def print(self, *args: Any, sep: str = " ", end: str = "\n") -> None:
        """Writes values to the standard output of the main process.

        Args:
            *args: the values.
            sep: what is written between them.
            end: what is written after them.
        """
        if self.is_global_zero:
            sys.stdout.write(sep.join(map(str, args)) + end)

    def log_value(self, name: str, value: Any, **options: Any) -> None:
        """Logs a value in the hook that is being called; see `forgather.lightning.logged.LoggedValues.log`.

        Args:
            name: the name of the value.
            value: the value.
            **options: the options of `self.log`.
        """
        scene = self._scene
        if scene is None or scene.hooks.current is None:
            raise unsupported(f"self.log({name!r}) is called outside of a hook", "log in a step or in a hook")
        scene.values.log(scene.hooks.current, name, value, **options)

    def log_values(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Logs several values, see `log_value`."""
        for name, value in dictionary.items():
            self.log_value(name, value, **options)

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Gives metrics to the log and the trackers of the run.

        Args:
            values: the metrics, by name.
        """
        if values and self._loop is not None:
            self._loop.log_values(dict(values))


def _before_fit(what: str) -> TrainingError:
    return unsupported(f"{what} before fit", "do it in a hook of the run, in configure_optimizers, or after it")
