"""`DistributedTrainer`: trains what a script gives, by the text of the config that does the same.

The input is a model and a mapping of words; a call of `train` writes the text of a config, builds a trainer from this
text by the ordinary stages of a `Project`, and trains. `to_config` returns the text. The run is recorded in the output
folder as one of `fgcli train` is.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.distributed.arguments import ATTEMPTS, COUNT, FLAG, PATH, refuse_wrong
from forgather.distributed.data_loader import read_data
from forgather.distributed.engine import MODEL_VARIABLE, Engine, launch_line, read_engine, refuse_missing_loss
from forgather.distributed.optimizer import read_optimizer
from forgather.distributed.script_config import ScriptConfig
from forgather.distributed.script_parts import ScriptParts, are_same_objects
from forgather.distributed.words import merged_words, read_words
from forgather.errors import CheckpointError, TrainingError
from forgather.heartbeat import Heartbeat
from forgather.launch.restart import resumes_after_restart
from forgather.launcher_env import process_facts
from forgather.project.fault_tolerance import FaultTolerance
from forgather.project.run_writer import make_run_folder, remove_unused_record, write_record

_log = logging.getLogger(__name__)


def setup_distributed_training(model: Any, config: Mapping[str, Any] | None = None) -> DistributedTrainer:
    """Returns a trainer for a model and a mapping of words; `train(epochs=10)` trains.

    Args:
        model: a module, a callable that returns one, or a DeepSpeed engine.
        config: the words, see `DistributedTrainer`.

    Raises:
        TrainingError: FG810 to FG813 if a word or its value cannot be used.
    """
    return DistributedTrainer(model, config=config)


class DistributedTrainer:
    """Trains a model of a script in this process, or in each process that a launcher started.

    Args:
        engine: a module, a callable that returns one (a class or a `functools.partial`), a DeepSpeed engine, or an
            object of `forgather.distributed`. A callable is called after the seed was set.
        optimizer: an optimizer of torch over the weights of the model; None for the default one.
        monitor: a `TrainingMonitor`, or another callback.
        config: the words: `batch_size` 1, `learning_rate` 1e-4, `zero_stage` 2, `fp16` True,
            `gradient_accumulation_steps` 1, `gradient_clipping` 1.0, `offload_optimizer` and `offload_param` False,
            `activation_checkpointing` False, `save_dir` "./checkpoints", `save_interval` 1000, `keep_checkpoints`,
            `log_interval` 10, `steps_per_print` 10, `save_logs` False, `strict` False; and every setting of
            `AccelTrainingArguments`. Objects: `train_dataset`, `eval_dataset`, `loss_fn`, `data_collator`,
            `processing_class`, `callbacks`, `optimizer_factory`, `lr_scheduler_factory`, `save_function`, ...

    Raises:
        TrainingError: FG801 if there is no model; FG810 to FG813 if a word or its value cannot be used; FG819 if the
            optimizer cannot be used.
    """

    def __init__(
        self, engine: Any, optimizer: Any = None, monitor: Any = None, config: Mapping[str, Any] | None = None
    ) -> None:
        found = read_engine(engine)
        given_words = merged_words(found.words, config)
        words = read_words(given_words)
        optimizer = found.optimizer if optimizer is None else optimizer
        self._given = (given_words, optimizer)
        given = words.objects.get("train_dataset")
        self._parts = ScriptParts(
            engine=found,
            words=words,
            # Once: a strategy may replace the weights of the module, by which groups are found.
            optimizer=None if optimizer is None else read_optimizer(optimizer, words.settings, found.model),
            monitor=monitor,
            data=None if given is None else read_data(given),
        )
        self._resume: str | None = None
        self._ended: str = ""
        self._initial: Any = None
        self._trainer: Any = None
        self._built: tuple[str, dict[str, Any]] | None = None
        self._folder = ""
        self._run_dir: str | None = None
        self._refuse_fp16()

    def as_engine(self) -> Engine:
        """Returns what this trainer trains, for another one, with the words, the optimizer and the monitor."""
        words, optimizer = self._given
        if self._parts.monitor is not None:
            words = {**words, "callbacks": [*(words.get("callbacks") or ()), self._parts.monitor]}
        return replace(self._parts.engine, words=words, optimizer=optimizer)

    def to_config(self) -> str:
        """Returns the text of the config that does what `train` does.

        What a config cannot contain, such as the module of the script, is a variable (`!var model`).
        """
        return self._config()[0].text

    @property
    def variables(self) -> dict[str, Any]:
        """The values of the variables in the text of `to_config`, by name."""
        return self._config()[1]

    @property
    def trainer(self) -> Any:
        """The trainer that the last call of `train` has built; None before the first one."""
        return self._trainer

    @property
    def model(self) -> Any:
        """The model: that of the trainer once it is built, and before that what the script gave."""
        return self._parts.engine.model if self._trainer is None else self._trainer.model

    def train(self, epochs: float | None = None, data_loader: Any = None) -> Any:
        """Trains to the end of the run, saves the model into `save_dir`, and returns the `TrainOutput`.

        Collective: every process must call it.

        Args:
            epochs: the number of passes over the data; by default that of the config, or 1.
            data_loader: a `DataLoader` of torch, a `DistributedDataLoader` or a data set; by default
                `config["train_dataset"]`.

        Raises:
            TrainingError: FG802 if there is no data; FG811 or FG812 if the loader cannot be taken over; FG859 if this
                object has trained already, and neither `restore_from_checkpoint` nor `reset` was called.
        """
        if data_loader is not None:
            self._parts = replace(self._parts, data=read_data(data_loader))
        if epochs is not None:
            self._parts = replace(self._parts, epochs=epochs)
        if self._parts.data is None:
            raise TrainingError(
                "there is no training data",
                code="FG802",
                hint="give it to train(epochs, data_loader), or as config['train_dataset']",
            ).about("data_loader")
        if self._ended and self._resume is None:
            raise TrainingError(
                f"this trainer's last run has {self._ended}: another one would begin with its weights and without its "
                "optimizer",
                code="FG859",
                hint="call restore_from_checkpoint() to go on, or reset() to start from the beginning",
            )
        resume = self._resume or ("auto" if self._resumes_after_restart() else None)
        tolerance = self._parts.tolerance
        attempts = 0 if tolerance is None or _world_size() > 1 else tolerance.max_retry_attempts
        for left in range(attempts, -1, -1):
            try:
                return self._train(resume)
            except Exception as error:
                # Not of the training: a wrong config, for example, ends every attempt.
                if self._ended != "failed" or left == 0 or self._would_fail_again(error):
                    raise
                resume = self._newest() if tolerance is not None and tolerance.auto_resume else None
                _log.warning("%s: %s; trying again, from %s", type(error).__name__, error, resume or "the beginning")
                if resume is None:
                    self._restore_initial()
                else:
                    self._forget_trainer()
        raise AssertionError("the last attempt returns or raises")

    def enable_fault_tolerance(
        self, auto_resume: bool = True, max_retry_attempts: int = 3, checkpoint_interval: int | None = None
    ) -> None:
        """Lets a run that fails start again from its newest checkpoint.

        In one process, `train` tries again itself. Several processes are started again by their launcher, which must be
        told how often.

        Args:
            auto_resume: whether a further attempt resumes from the newest checkpoint.
            max_retry_attempts: the number of further attempts.
            checkpoint_interval: the number of steps between checkpoints; None for `save_interval`.

        Raises:
            TrainingError: FG811 if the launcher makes fewer attempts; FG812 if `save_interval` is another number.
        """
        refuse_wrong(locals(), {"auto_resume": FLAG, "max_retry_attempts": ATTEMPTS, "checkpoint_interval": COUNT})
        facts = process_facts(os.environ)
        allowed = facts.attempts_left + (facts.attempt or 0)
        if facts.world_size > 1 and allowed < max_retry_attempts:
            raise TrainingError(
                f"max_retry_attempts is {max_retry_attempts}, and the launcher starts the processes again {allowed} "
                "times",
                code="FG811",
                hint=launch_line(facts.local_world_size, f"--max-restarts {max_retry_attempts}"),
            ).about("max_retry_attempts")
        words = self._parts.words
        given = words.settings.get("save_steps")
        if checkpoint_interval is not None and given not in (None, checkpoint_interval):
            raise TrainingError(
                f"checkpoint_interval is {checkpoint_interval}, and {words.origins['save_steps']} is {given}",
                code="FG812",
                hint="keep one of them",
            ).about("checkpoint_interval")
        tolerance = FaultTolerance(
            auto_resume=auto_resume, max_retry_attempts=max_retry_attempts, checkpoint_interval=checkpoint_interval
        )
        self._parts = replace(self._parts, tolerance=tolerance)

    def has_checkpoint(self) -> bool:
        """Returns whether `save_dir` has an intact checkpoint."""
        return self._newest() is not None

    def restore_from_checkpoint(self, path: str | os.PathLike[str] | None = None) -> str:
        """Lets the next call of `train` go on from a checkpoint, and returns its folder.

        Weights, optimizer, schedule, position in the data and random numbers are restored when `train` begins.

        Args:
            path: the folder of the checkpoint; None for the newest intact one in `save_dir`.

        Raises:
            CheckpointError: FG601 if there is none.
            TrainingError: FG811 if a run of several processes has failed in this process.
        """
        refuse_wrong(locals(), {"path": PATH})
        if self._ended == "failed" and _world_size() > 1:
            raise TrainingError(
                "one of several processes cannot go on after a failure: the other ones wait for it, or have failed",
                code="FG811",
                hint="call enable_fault_tolerance() before train(), and "
                + launch_line(process_facts(os.environ).local_world_size, "--max-restarts 3"),
            )
        found: str | None = self._newest() if path is None else os.fspath(path)
        if found is None:
            raise CheckpointError(
                f"{self._output_dir!r} has no intact checkpoint",
                code="FG601",
                hint="call reset() to start from the beginning",
            )
        if self._ended == "failed":
            self._forget_trainer()
        self._resume = found
        return found

    def reset(self, *, discard_checkpoints: bool = False) -> None:
        """Lets the next call of `train` start from the beginning, with the initial weights.

        For this, a copy of the module or of its weights is kept from the first call of `train` on. If the strategy
        splits the model, `model` is another module afterwards.

        Args:
            discard_checkpoints: whether the checkpoints in `save_dir` may be removed, and a trained model be lost.

        Raises:
            TrainingError: FG859 if there is something to lose, and `discard_checkpoints` is False.
        """
        # Any other value than true or false, such as "no", must not remove anything.
        refuse_wrong(locals(), {"discard_checkpoints": FLAG})
        found = [folder for _, folder in self._checkpoints()]
        if (found or self._ended == "finished") and not discard_checkpoints:
            what = f"{len(found)} checkpoints in {self._output_dir!r}" if found else "the weights of the finished run"
            raise TrainingError(
                f"reset() would lose {what}",
                code="FG859",
                hint="call reset(discard_checkpoints=True), or restore_from_checkpoint() to go on",
            )
        self._restore_initial()
        if process_facts(os.environ).rank == 0:
            storage = import_module("forgather.ml.checkpoint.storage").LocalStorage()
            for folder in found:
                import_module("forgather.ml.checkpoint.checkpoint_dir").discard_folder(storage, folder)
        self._resume, self._ended = None, ""

    @property
    def _output_dir(self) -> str:
        return os.path.expanduser(str(self._config()[0].settings["output_dir"]))

    def _newest(self) -> str | None:
        found, _ = import_module("forgather.ml.checkpoint.lineage").newest_verified(Path(self._output_dir))
        return None if found is None else str(found)

    def _checkpoints(self) -> list[tuple[int, Path]]:
        found: list[tuple[int, Path]] = import_module("forgather.ml.checkpoint.checkpoint_dir").list_checkpoints(
            Path(self._output_dir)
        )
        return found

    def _resumes_after_restart(self) -> bool:
        return self._parts.tolerance is not None and resumes_after_restart(self._parts.tolerance, os.environ)

    def _would_fail_again(self, error: Exception) -> bool:
        cause = import_module("forgather.ml.distributed.root_cause")
        phase = import_module("forgather.ml.distributed.phase").current_phase()
        return bool(cause.record_of(error, phase, told=True).lasts)

    def _config(self) -> tuple[ScriptConfig, dict[str, Any]]:
        """Returns the config of the run as far as it is known, and the values of its variables."""
        return self._parts.config()

    def _refuse_fp16(self) -> None:
        settings = self._config()[0].settings
        # Other values are found by the rules of the trainer.
        if settings.get("fp16") is not True:
            return
        if settings.get("use_cpu") is True or not import_module("torch").accelerator.is_available():
            is_default = "fp16" not in self._parts.words.settings
            raise TrainingError(
                f"fp16 is True{' by default' if is_default else ''}, and this run is on the CPU",
                code="FG811",
                hint="write fp16: False in the config, or bf16: True",
            ).about("fp16")

    def _train(self, resume: str | None) -> Any:
        config, variables = self._config()
        trainer = self._built_trainer(config, variables)
        facts = process_facts(os.environ)
        self._resume = None
        rank = facts.rank if facts.world_size > 1 else None
        started = datetime.now(UTC).timestamp()
        writes = self._run_dir is not None
        with Heartbeat(str(self._run_dir), started=started, rank=rank) if writes else nullcontext() as heartbeat:
            if heartbeat is not None:
                heartbeat.watch(trainer)
            self._ended = "failed"
            result = trainer.train(resume_from_checkpoint=resume)
        self._ended = "finished"
        return result

    def _built_trainer(self, config: ScriptConfig, variables: dict[str, Any]) -> Any:
        """Returns the trainer of a config; the one of the last run if nothing has changed, which has the model."""
        is_same = self._built is not None and self._built[0] == config.text
        if is_same and self._built is not None and are_same_objects(self._built[1], variables):
            return self._trainer
        if self._trainer is not None:
            self._forget_trainer()
            config, variables = self._config()
        self._keep_initial(config)
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="forgather-script-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if "loss_fn" not in variables:
            refuse_missing_loss(self._parts.engine.model, variables["train_dataset"])
        project = config.open(self._folder)
        project.refuse_errors()
        started = datetime.now(UTC)
        self._run_dir = None
        if process_facts(os.environ).rank == 0:
            output_dir = os.path.abspath(self._output_dir)
            self._run_dir = make_run_folder(output_dir, f"{config.name}.yaml", started)
            write_record(self._run_dir, project, command=[sys.executable, *sys.argv], started=started)
        try:
            trainer = project("main", run_dir=self._run_dir, **variables)
        except BaseException:
            if self._run_dir is not None:
                remove_unused_record(self._run_dir)
            raise
        self._trainer, self._built = trainer, (config.text, variables)
        return trainer

    def _keep_initial(self, config: ScriptConfig) -> None:
        """Keeps what `reset` and a recovery need of a module, before a strategy changes it."""
        if self._initial is not None or self._parts.engine.is_constructor:
            return
        if config.is_replicated:
            weights = self._parts.engine.model.state_dict()
            self._initial = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
        else:
            # The strategy replaces the weights of the module, which cannot be trained by another trainer then.
            self._initial = copy.deepcopy(self._parts.engine.model)

    def _restore_initial(self) -> None:
        if self._trainer is None:
            return
        if isinstance(self._initial, dict):
            self._parts.engine.model.load_state_dict(self._initial)
        else:
            self._forget_trainer()

    def _forget_trainer(self) -> None:
        """Forgets a trainer whose model is split, so that the next one gets the module as it was."""
        if isinstance(self._initial, dict):
            return
        self._trainer, self._built = None, None
        if self._initial is not None:
            model = copy.deepcopy(self._initial)
            engine = replace(self._parts.engine, model=model, variables={MODEL_VARIABLE: model})
            self._parts = replace(self._parts, engine=engine)


def _world_size() -> int:
    return process_facts(os.environ).world_size
