"""`Trainer`: Lightning's trainer in a script, which trains a `LightningModule` by our trainers.

The input is Lightning's words and a module; `fit`, `validate`, `test` and `predict` do what Lightning's do. The words
become our settings (`forgather.lightning.words`), and the run has our checkpoints, accounting and record.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from forgather.errors import DistributedError, TrainingError
from forgather.lightning.callbacks import ModelCheckpoint
from forgather.lightning.checkpoints import (
    inner_folder,
    load_weights,
    resume_folder,
    saved_paths,
    write_hyperparameters,
)
from forgather.lightning.evaluation import evaluate_module, predict_module
from forgather.lightning.fitting import ModuleAccelLoop, ModuleLoop
from forgather.lightning.hooks import Hooks, overridden, refuse_unsupported, unsupported
from forgather.lightning.scene import Scene, effective
from forgather.lightning.seeds import given_seed
from forgather.lightning.stage_data import LOADER_OF, STEP_OF, StageData
from forgather.lightning.steps import ModuleSteps
from forgather.lightning.trainer_facts import TrainerFacts
from forgather.lightning.words import read_words
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.distributed import collectives
from forgather.ml.distributed.env import DistributedEnvironment, process_facts
from forgather.ml.log import get_logger
from forgather.ml.trainer.accel import with_group_settings
from forgather.ml.trainer.parallel_arguments import accelerator_settings
from forgather.ml.types import Topology

_log = get_logger(__name__)


class Trainer(TrainerFacts):
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
        self.checkpoint_callback = _checkpoint_callback(words)
        self._has_fitted = False
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
        if self._has_fitted:
            raise unsupported(
                "fit is called twice", "make a Trainer for each run; ckpt_path goes on with an earlier one"
            )
        loop = self._prepared(model, {"train": train_dataloaders, "validate": val_dataloaders}, datamodule, "fit")
        self._has_fitted = True
        scene = self._scene
        assert scene is not None  # noqa: S101
        if not model.training:
            raise unsupported("the module is in evaluation mode", "call model.train() before fit")
        try:
            loop.train(resume_folder(ckpt_path, self.words.settings.get("output_dir", loop.args.output_dir)))
        except BaseException as error:
            # Requests of checkpoints are no longer those of a step.
            scene.stage = ""
            scene.hooks.call_callbacks("on_exception", error)
            data = self._data
            if data is not None and data.datamodule is not None and overridden(data.datamodule, "on_exception"):
                data.datamodule.on_exception(error)
            raise
        scene.hooks.call("on_fit_end")
        self.write_requested()
        if self.checkpoint_callback is not None:
            best, last, score = saved_paths(loop.args.output_dir)
            self.checkpoint_callback.set_saved(best=best, last=last, score=score)
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
        """Returns what `predict_step` returns for each batch, in a list for each loader if there are several.

        Args:
            model: the module; by default that of the last call.
            dataloaders: the loader or loaders, or a data module; by default the hook's.
            datamodule: the data module, in place of loaders.
            return_predictions: false to return None. Every process must make the call, and gets its own rows.
            ckpt_path: the checkpoint whose weights predict: "last", "best" or a folder.
        """
        self._begin_stage("predict", model, dataloaders, ckpt_path, datamodule)
        assert self._scene is not None and self._data is not None  # noqa: S101, PT018
        found = predict_module(self._scene, self._data.loaders("predict"))
        self._teardown("predict")
        return None if return_predictions is False else found[0] if len(found) == 1 else found

    def save_checkpoint(self, filepath: str | os.PathLike[str], weights_only: bool = False) -> None:
        """Writes a checkpoint into a folder of this name.

        In a step of training, it is written at the step's end, if the main process has asked for it. After `fit`, every
        process must call this.

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
        requested, self._requested = self._requested, []
        # The main process decides: scripts ask for a checkpoint where is_global_zero is true. Most steps
        # have no request, for which a number is enough.
        if not collectives.broadcast_from_main([bool(requested)])[0]:
            return
        for path in collectives.run_on_main(lambda: requested):
            assert self._loop is not None  # noqa: S101
            self._loop.run.saver.save_into(path)

    # -- the stages ----------------------------------------------------------------------------------------------------

    def _evaluated(
        self, stage: str, model: Any, given: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        self._begin_stage(stage, model, given, ckpt_path, datamodule)
        assert self._scene is not None and self._data is not None  # noqa: S101, PT018
        found = evaluate_module(self._scene, self._data.loaders(stage), stage)
        self._teardown(stage)
        for number, metrics in enumerate(found):
            shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            if verbose and self.is_global_zero:
                _log.warning("%s%s: %s", stage, f" {number}" if len(found) > 1 else "", shown or "nothing was logged")
        return found

    def _begin_stage(self, stage: str, model: Any, given: Any, ckpt_path: Any, datamodule: Any) -> None:
        if hasattr(given, LOADER_OF[stage]):
            given, datamodule = None, given
        if model is None and self._scene is None:
            raise TrainingError(f"{stage} is given no model", code="FG801", hint="give a LightningModule")
        self._prepared(model or self.lightning_module, {stage: given}, datamodule, stage)
        assert self._scene is not None and self._data is not None  # noqa: S101, PT018
        if stage != "predict" and not overridden(self._scene.module, STEP_OF[stage]):
            raise unsupported(f"{type(self._scene.module).__name__} has no {STEP_OF[stage]}", "define it")
        if not self._data.loaders(stage):
            raise TrainingError(
                f"{stage} has no data", code="FG824", hint=f"give dataloaders, or define {LOADER_OF[stage]}"
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

    def _prepared(self, model: Any, given: Mapping[str, Any], datamodule: Any, stage: str) -> ModuleLoop:
        """Attaches a module and its data, calls their `prepare_data` and `setup`, and builds our trainer around it."""
        if not isinstance(model, nn.Module) or not hasattr(model, "training_step"):
            raise unsupported(f"the model is a {type(model).__name__}", "give a LightningModule")
        if self._scene is not None and self._scene.module is model and stage != "fit":
            assert self._loop is not None and self._data is not None  # noqa: S101, PT018
            self._data.give(stage, given[stage], datamodule or self._data.datamodule)
            self._call_setup(stage)
            return self._loop
        owner_of_hooks: Any = model
        configured = owner_of_hooks.configure_callbacks()
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
        data = self._data = StageData(
            scene, given, datamodule, self._topology, replaces_samplers=self.words.replaces_samplers
        )
        self._attach(model)
        if self._seeds_again and (seed := given_seed()) is not None:
            # As Lightning's strategies for several processes do, before they call `prepare_data`.
            seed_everything(seed)
        kind = ModuleAccelLoop if self.words.trainer.endswith("AccelTrainer") else ModuleLoop
        args: Any = kind.ARGUMENTS(**self._settings())
        if process_facts().world_size > 1:
            # Now: processes wait for the one that prepares the data.
            found = accelerator_settings(args.accelerator_args)
            with_group_settings(DistributedEnvironment(), found, use_cpu=args.use_cpu).start(use_cpu=args.use_cpu)
        self._call_setup(stage)
        self._steps = ModuleSteps(scene, lambda: data.loaders("validate"), data.train_loader)
        of_ours = [one for one in self._given if isinstance(one, TrainerCallback)]
        self._loop = kind(self._steps, args=args, callbacks=of_ours, save_function=write_hyperparameters)
        return self._loop

    def _topology(self) -> Topology:
        assert self._loop is not None  # noqa: S101
        return self._loop.strategy.topology

    def _settings(self) -> dict[str, Any]:
        settings = dict(self.words.settings)
        assert self._scene is not None  # noqa: S101
        owners = [self._scene.module, *self._scene.hooks.callbacks]
        reads_gradients = any(overridden(owner, "on_before_optimizer_step") for owner in owners)
        if settings.get("fp16") and (reads_gradients or self._clip_value is not None):
            # Our strategies unscale gradients in the step itself, after this hook.
            raise unsupported(
                "gradients are read before the optimizer step, and those of 16-mixed are scaled then",
                'use precision="bf16-mixed", without on_before_optimizer_step or clipping by value otherwise',
            )
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

    def _attach(self, model: Any) -> None:
        # Of Lightning's own class: the setter would make a weak reference, and `log` would look for Lightning's loops.
        model._trainer = self
        if not type(model).log.__module__.startswith("forgather."):
            model.log, model.log_dict = self.log_value, self.log_values

    def _call_setup(self, stage: str) -> None:
        scene, data = self._scene, self._data
        assert scene is not None and data is not None  # noqa: S101, PT018
        datamodule = data.datamodule
        if datamodule is not None:
            datamodule.trainer = self
        # The other ranks wait: they read what was prepared, or end if it failed.
        collectives.run_collectively(lambda: _prepare_data((datamodule, scene.module)))
        if datamodule is not None and overridden(datamodule, "setup"):
            datamodule.setup(stage)
        scene.hooks.call("setup", stage)
        scene.hooks.call_module("configure_model")
        scene.forget_metrics()

    def _teardown(self, stage: str) -> None:
        assert self._scene is not None and self._data is not None  # noqa: S101, PT018
        self._scene.stage = ""
        if self._data.datamodule is not None and overridden(self._data.datamodule, "teardown"):
            self._data.datamodule.teardown(stage)
        self._scene.hooks.call("teardown", stage)


def _prepare_data(owners: tuple[Any, ...]) -> None:
    """Calls `prepare_data` of the owners of data, on one process of each machine or, if they say so, of all."""
    facts = process_facts()
    for owner in owners:
        number = facts.local_rank if getattr(owner, "prepare_data_per_node", True) else facts.rank
        if owner is not None and number == 0 and overridden(owner, "prepare_data"):
            owner.prepare_data()


def _checkpoint_callback(words: Mapping[str, Any]) -> ModelCheckpoint | None:
    """Returns the first `ModelCheckpoint` of a script, or a default one; None if checkpoints are turned off."""
    if words.get("enable_checkpointing") is False:
        return None
    given = words.get("callbacks") or ()
    found = [one for one in (given if isinstance(given, list | tuple) else [given]) if isinstance(one, ModelCheckpoint)]
    return found[0] if found else ModelCheckpoint()
