"""`Trainer`: Lightning's trainer in a script, which trains a `LightningModule` by our trainers.

The input is Lightning's words and a module; `fit`, `validate`, `test` and `predict` do what Lightning's do. The words
become our settings (`forgather.lightning.words`), and the run has our checkpoints, accounting and record.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import DistributedError, TrainingError
from forgather.lightning import loaders
from forgather.lightning.checkpoints import inner_folder, load_weights, resume_folder, write_hyperparameters
from forgather.lightning.evaluation import evaluate_module, num_batches, predict_module
from forgather.lightning.fitting import ModuleAccelLoop, ModuleLoop, ModuleSteps
from forgather.lightning.hooks import Hooks, overridden, refuse_unsupported, unsupported
from forgather.lightning.scene import Scene, effective
from forgather.lightning.schedules import ScheduleConfig
from forgather.lightning.seeds import given_seed
from forgather.lightning.words import read_words
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.distributed import collectives
from forgather.ml.distributed.env import process_facts
from forgather.ml.log import get_logger

_log = get_logger(__name__)
_LOADER_OF = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}
_LOADER_OF["predict"] = "predict_dataloader"
_STEP_OF = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class Trainer:
    """Trains, evaluates and applies a `LightningModule`.

    Args:
        **words: the words of Lightning's `Trainer`.

    Raises:
        SettingError: FG810 to FG814 if a word is unknown, or has no counterpart here.
    """

    def __init__(self, **words: Any) -> None:
        self.words = read_words(**words)
        names_strategy = words.get("strategy") not in (None, "auto")
        self._seeds_again = process_facts().world_size > 1 or (names_strategy and self.words.strategy != "single")
        limits = effective(self.words.limits)
        if words.get("check_val_every_n_epoch", 1) is None:
            limits = dataclasses.replace(limits, check_val_every_n_epoch=None)
        self._limits, self._clip_value = limits, self.words.clip_value
        self._given = self.words.callbacks
        self.datamodule: Any = None
        self._scene: Scene | None = None
        self._steps: ModuleSteps | None = None
        self._loop: ModuleLoop | None = None
        self._held: dict[str, list[Any]] = {}
        self._sources: dict[str, Any] = {}
        self._requested: list[Path] = []

    # -- what scripts call ---------------------------------------------------------------------------------------------

    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Trains a module. Collective: every process must call it.

        Args:
            model: the `LightningModule`.
            train_dataloaders: the loader of the training data, or a data module; by default the module's hook.
            val_dataloaders: the loader of the validation data, or a list of several; by default the module's hook.
            datamodule: the data module, in place of loaders.
            ckpt_path: the checkpoint to resume from: "last", "best" or a folder.

        Raises:
            TrainingError: FG865 if the module has something that our trainers do not run; FG802 without data.
        """
        if hasattr(train_dataloaders, "train_dataloader"):
            train_dataloaders, datamodule = None, train_dataloaders
        if datamodule is not None and (train_dataloaders is not None or val_dataloaders is not None):
            raise unsupported("fit is given loaders and a datamodule", "give one of them")
        self._sources = {"train": train_dataloaders, "validate": val_dataloaders}
        loop = self._prepared(model, datamodule, "fit")
        scene = self._scene
        assert scene is not None  # noqa: S101
        if not model.training:
            raise unsupported("the module is in evaluation mode", "call model.train() before fit")
        try:
            loop.train(resume_folder(ckpt_path, self.words.settings.get("output_dir", loop.args.output_dir)))
        except BaseException as error:
            scene.hooks.call_callbacks("on_exception", error)
            raise
        scene.hooks.call("on_fit_end")
        self._teardown("fit")

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Returns the metrics of the validation data, of each loader. Collective.

        Args:
            model: the module; by default that of the last call.
            dataloaders: the loader or loaders, or a data module; by default the hook's.
            ckpt_path: the checkpoint whose weights are evaluated: "last", "best" or a folder.
            verbose: whether the metrics are logged.
            datamodule: the data module, in place of loaders.
        """
        return self._evaluated("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Returns the metrics of the test data, of each loader; the arguments are those of `validate`."""
        return self._evaluated("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
    ) -> list[Any] | None:
        """Returns what `predict_step` returns for each batch; with several loaders, a list for each of them. Collective.

        Args:
            model: the module; by default that of the last call.
            dataloaders: the loader or loaders, or a data module; by default the hook's.
            datamodule: the data module, in place of loaders.
            return_predictions: false to return None.
            ckpt_path: the checkpoint whose weights predict: "last", "best" or a folder.
        """
        self._begin_stage("predict", model, dataloaders, ckpt_path, datamodule)
        assert self._scene is not None  # noqa: S101
        found = predict_module(self._scene, self._loaders("predict"))
        self._teardown("predict")
        return None if return_predictions is False else found[0] if len(found) == 1 else found

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Writes a checkpoint into a folder of this name. In a step of training, it is written at the step's end.

        Args:
            filepath: the folder that gets the checkpoint.
            weights_only: must be false; `ModelCheckpoint(save_weights_only=True)` writes such checkpoints.
        """
        if weights_only:
            raise unsupported("save_checkpoint with weights_only", "use ModelCheckpoint(save_weights_only=True)")
        path = Path(filepath)
        if self._scene is not None and self._scene.stage and self._loop is not None:
            # Weights, position and random numbers fit together at the end of a step only.
            self._requested.append(path)
            return
        if self._loop is None or getattr(self._loop, "run", None) is None:
            raise unsupported("save_checkpoint is called before fit", "call it in a hook of the run, or after fit")
        self._loop.run.saver.save_into(path)

    def write_requested(self) -> None:
        """Writes the checkpoints that were asked for during a step. Collective: every process must call it."""
        # The main process decides: scripts ask for a checkpoint where is_global_zero is true.
        asked = collectives.run_on_main(lambda: self._requested) if collectives.is_multi_process() else self._requested
        self._requested = []
        for path in asked:
            assert self._loop is not None  # noqa: S101
            self._loop.run.saver.save_into(path)

    # -- what modules and callbacks read -------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        """The module, or None."""
        return None if self._scene is None else self._scene.module

    model = lightning_module

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
        assert self._scene is not None, "a module or a callback of a run sets it"  # noqa: S101
        self._scene.should_stop = wanted

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest metrics, by name, for callbacks and schedules."""
        return self._metrics().callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest metrics, by name, that trackers get."""
        return self._metrics().log

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest metrics, by name, that were logged with `prog_bar`."""
        return self._metrics().bar

    def _metrics(self) -> Any:
        scene = self._scene
        if scene is None:
            raise unsupported("metrics are read before fit", "read them in a hook of the run, or after it")
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
        assert self._loop is not None, "configure_optimizers reads it"  # noqa: S101
        return self._loop.num_steps[0]

    @property
    def num_training_batches(self) -> int | float:
        """The number of training batches of an epoch; infinite if it is unknown."""
        assert self._loop is not None  # noqa: S101
        found = self._loop.prepare_data().num_batches
        return float("inf") if found is None else found

    @property
    def num_val_batches(self) -> list[int | None]:
        """The number of batches of each loader of the validation data."""
        assert self._scene is not None  # noqa: S101
        return num_batches(self._scene, self._loaders("validate"), "validate")

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

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the main process."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201 - this is what the caller asked for

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

    def log_metrics(self, values: Mapping[str, float]) -> None:
        """Gives metrics to the log and the trackers of the run.

        Args:
            values: the metrics, by name.
        """
        if values and self._loop is not None:
            self._loop.log_values(dict(values))

    # -- the stages ----------------------------------------------------------------------------------------------------

    def _evaluated(
        self, stage: str, model: Any, given: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        self._begin_stage(stage, model, given, ckpt_path, datamodule)
        scene = self._scene
        assert scene is not None  # noqa: S101
        found = evaluate_module(scene, self._loaders(stage), stage)
        self._teardown(stage)
        for number, metrics in enumerate(found):
            shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            if verbose and self.is_global_zero:
                _log.warning("%s%s: %s", stage, f" {number}" if len(found) > 1 else "", shown or "nothing was logged")
        return found

    def _begin_stage(self, stage: str, model: Any, given: Any, ckpt_path: Any, datamodule: Any) -> None:
        if hasattr(given, _LOADER_OF[stage]):
            given, datamodule = None, given
        if model is None and self._scene is None:
            raise TrainingError(f"{stage} is given no model", code="FG801", hint="give a LightningModule")
        self._sources = {**self._sources, stage: given} if given is not None else dict(self._sources)
        self._held.pop(stage, None)
        self._prepared(model or self.lightning_module, datamodule or self.datamodule, stage)
        assert self._scene is not None  # noqa: S101
        if stage != "predict" and not overridden(self._scene.module, _STEP_OF[stage]):
            raise unsupported(f"{type(self._scene.module).__name__} has no {_STEP_OF[stage]}", "define it")
        if not self._loaders(stage):
            raise TrainingError(
                f"{stage} has no data", code="FG824", hint=f"give dataloaders, or define {_LOADER_OF[stage]}"
            )
        if ckpt_path is not None:
            self._load(ckpt_path)

    def _load(self, ckpt_path: Any) -> None:
        scene, loop = self._scene, self._loop
        assert scene is not None and loop is not None  # noqa: S101, PT018
        if loop.strategy.topology.world_size > 1:
            raise unsupported("ckpt_path of an evaluation on several processes", "load the weights before the trainer")
        folder = resume_folder(ckpt_path, loop.args.output_dir)
        if folder is True:
            found = inner_folder(Path(loop.args.output_dir))
            folder = str(found)
        load_weights(scene.module, Path(folder))

    def _prepared(self, model: Any, datamodule: Any, stage: str) -> ModuleLoop:
        """Attaches a module and its data, calls their `prepare_data` and `setup`, and builds our trainer around it."""
        if not isinstance(model, nn.Module) or not hasattr(model, "training_step"):
            raise unsupported(f"the model is a {type(model).__name__}", "give a LightningModule")
        if self._scene is not None and self._scene.module is model and stage != "fit":
            self._call_setup(datamodule, stage)
            assert self._loop is not None  # noqa: S101
            return self._loop
        configured = model.configure_callbacks()
        own = [one for one in self._given if not isinstance(one, TrainerCallback)]
        own += list(configured) if isinstance(configured, list | tuple) else [configured]
        refuse_unsupported(model, own, datamodule)
        self._refuse_processes()
        scene = self._scene = Scene(
            self,
            model,
            Hooks(self, model, own),
            self._limits,
            log_every_n_steps=int(self.words.settings.get("logging_steps", 0)),
            clip_value=self._clip_value,
        )
        self._attach(model, datamodule)
        self._held = {}
        if self._seeds_again and (seed := given_seed()) is not None:
            # As Lightning's strategies for several processes do, before they call `prepare_data`.
            seed_everything(seed)
        self._call_setup(datamodule, stage)
        self._steps = ModuleSteps(scene, lambda: self._loaders("validate"), self._train_loader)
        of_ours = [one for one in self._given if isinstance(one, TrainerCallback)]
        kind = ModuleAccelLoop if self.words.trainer.endswith("AccelTrainer") else ModuleLoop
        self._loop = kind(
            self._steps,
            args=kind.ARGUMENTS(**self._settings()),
            callbacks=of_ours,
            save_function=write_hyperparameters,
        )
        return self._loop

    def _settings(self) -> dict[str, Any]:
        settings = dict(self.words.settings)
        if "metric_for_best_model" in settings:
            # The loop of the module decides when it validates; our settings only have to say that it does.
            settings |= {"eval_strategy": "epoch", "eval_delay": 2**31}
        return settings

    def _refuse_processes(self) -> None:
        found, asked = process_facts().world_size, self.words.num_processes
        if self.words.strategy == "deepspeed":
            raise unsupported(
                "a module is trained with strategy='deepspeed'", "use strategy='ddp' or 'fsdp', which shards as ZeRO-3"
            )
        if asked is not None and asked > 1 and found == 1:
            raise DistributedError(
                f"this script is one process, and devices and num_nodes state {asked}",
                code="FG776",
                hint=f"start it with: torchrun --nproc-per-node {self.words.processes_per_node} script.py",
            )

    def _attach(self, model: Any, datamodule: Any) -> None:
        self.datamodule = datamodule
        # Of Lightning's own class: the setter would make a weak reference, and `log` would look for Lightning's loops.
        model._trainer = self
        if not model.__class__.log.__module__.startswith("forgather."):
            model.log = self.log_value
            model.log_dict = lambda values, **options: [
                self.log_value(name, of, **options) for name, of in values.items()
            ]
        if datamodule is not None:
            datamodule.trainer = self

    def _call_setup(self, datamodule: Any, stage: str) -> None:
        scene = self._scene
        assert scene is not None  # noqa: S101
        self.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = self
        for owner in (datamodule, scene.module):
            if owner is not None and process_facts().local_rank == 0 and overridden(owner, "prepare_data"):
                owner.prepare_data()
        if process_facts().world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if datamodule is not None and overridden(datamodule, "setup"):
            datamodule.setup(stage)
        scene.hooks.call("setup", stage)
        scene.hooks.call_module("configure_model")
        scene.forget_metrics()

    def _teardown(self, stage: str) -> None:
        assert self._scene is not None  # noqa: S101
        self._scene.stage = ""
        if self.datamodule is not None and overridden(self.datamodule, "teardown"):
            self.datamodule.teardown(stage)
        self._scene.hooks.call("teardown", stage)

    # -- the loaders ---------------------------------------------------------------------------------------------------

    def _train_loader(self) -> Any:
        found = loaders.several(self._requested_loaders("train"))
        if not found:
            raise TrainingError(
                "there is no training data", code="FG802", hint="give fit a loader, or define train_dataloader"
            )
        if len(found) > 1:
            raise unsupported(f"fit is given {len(found)} training loaders", "join the data sets in one loader")
        return self._distributed(found[0], "train")

    def _loaders(self, stage: str) -> list[Any]:
        """Returns the loaders of a stage, which are asked for once; none if the module has no step for it."""
        scene = self._scene
        assert scene is not None  # noqa: S101
        has_step = stage == "predict" or overridden(scene.module, _STEP_OF[stage])
        limit = {"validate": scene.limits.limit_val_batches, "test": scene.limits.limit_test_batches}.get(stage, 1)
        if not has_step or not limit:
            return []
        if stage not in self._held:
            found = loaders.several(self._requested_loaders(stage))
            self._held[stage] = [self._distributed(one, stage) for one in found]
        return self._held[stage]

    def _requested_loaders(self, stage: str) -> Any:
        if self._sources.get(stage) is not None:
            return self._sources[stage]
        assert self._scene is not None  # noqa: S101
        for owner in (self.datamodule, self._scene.module):
            if owner is not None and overridden(owner, _LOADER_OF[stage]):
                return getattr(owner, _LOADER_OF[stage])()
        return None

    def _distributed(self, loader: Any, stage: str) -> Any:
        assert self._loop is not None and self._scene is not None  # noqa: S101, PT018
        overfits = bool(self._scene.limits.overfit_batches) and stage in ("train", "validate")
        return loaders.prepared(loader, stage, self._loop.strategy.topology, overfits=overfits)
