"""The start of a run: checks of the launcher and of combined arguments, the checkpoint to resume, and the run's length.

The config takes precedence over the launcher. It is an error if `accelerate launch` or its config file requests another
engine (such as DeepSpeed) than the config, because everything about the run would differ. Other settings of the
launcher are ignored, and `launch/process_request.py` reports them. `checkpoint_to_resume` and `num_steps_and_epochs`
return the checkpoint and the length of the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from forgather import launcher_env
from forgather.errors import DistributedError, TrainingError
from forgather.interrupt import current_handler
from forgather.ml.callbacks.profile import ProfileCallback
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed.env import launcher_name, resolve_process_count
from forgather.ml.log import get_logger
from forgather.ml.model_class import num_parameters
from forgather.ml.number_format import format_share, plural
from forgather.ml.strategy.registry import STRATEGIES, entry_of
from forgather.ml.trainer import argument_checks, model_export, resume
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.rule_conditions import SOMETHING
from forgather.rules import Rules

_ENGINES = {
    **{entry.launcher_variable: (entry.engine, entry.hint) for entry in STRATEGIES if entry.launcher_variable},
    "USE_MEGATRON_LM": ("Megatron-LM", "no trainer here uses it"),
    "USE_PARALLELISM_CONFIG": (
        "its parallelism config",
        "set data_parallel_size and tensor_parallel_size in trainer_args",
    ),
}


def refuse_another_engine(args: Any, variables: Mapping[str, str]) -> None:
    """Raises an error if Accelerate's launcher requests another engine (such as DeepSpeed) than the config.

    Args:
        args: the training arguments.
        variables: the environment variables that Accelerate's launcher sets.

    Raises:
        DistributedError: FG724 if the engines differ.
    """
    for name, (asked, hint) in _ENGINES.items():
        if _is_on(variables.get(name)) and asked != (engine := entry_of(args).engine):
            raise DistributedError(
                f"accelerate launch, or its config file, requests {asked}, and the config trains with {engine}",
                code="FG724",
                hint=f"{hint}, or start it with 'fgcli train' or torchrun, which do not read that file",
            )


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "on", "y", "t")


_CODES = ("FG770", "FG775", "FG971", "FG972")


def refuse_combination(rules: Rules, args: TrainingArguments, **given: Any) -> None:
    """Raises an error if the training arguments cannot be combined with the trainer or with its other arguments.

    Args:
        rules: the rules about the trainer's constructor.
        args: the training arguments.
        **given: the other arguments of the trainer's constructor, by name.

    Raises:
        SettingError: FG770, FG775, FG971 or FG972 if a combination is not allowed.
    """
    facts = rules.complete({})
    facts |= {f"args.{name}": value for name, value in args.RULES.complete(args.to_dict()).items()}
    facts |= {f"{name}.calls": _constructor_name(value) for name, value in given.items()}
    facts |= {name: None if value is None else SOMETHING for name, value in given.items()}
    argument_checks.raise_first_error(breach for breach in rules.broken(facts) if breach.code in _CODES)


def _constructor_name(value: Any) -> str:
    """Returns the `"module:attr"` string of an object's constructor, in lower case; "" if the object is None."""
    if value is None:
        return ""
    # The function inside of a partial: rules name the constructor that the user chose.
    value = getattr(value, "func", value)
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}".lower()


_log = get_logger(__name__)


def warn_of_untried_batch(args: Any) -> None:
    """Logs a warning if the training arguments ask for a batch that was tried before the run, and none was."""
    if args.auto_find_batch_size:
        rows = args.per_device_train_batch_size
        _log.warning("auto_find_batch_size has no effect: only `fgcli train` tries batches, this run has %d rows", rows)


_AROUND_THE_UPDATE = ("on_pre_optimizer_step", "on_optimizer_step")


def refuse_gradient_readers(args: TrainingArguments, callbacks: Iterable[TrainerCallback]) -> None:
    """Raises an error if weights are updated in the backward pass, and a callback of the user may read gradients.

    Args:
        args: the training arguments.
        callbacks: the callbacks of the run.

    Raises:
        TrainingError: FG707 if a callback has an event that stands between the gradients and the update.
    """
    if not args.optimizer_in_backward:
        return
    for callback in callbacks:
        for name in _AROUND_THE_UPDATE:
            owner = next((one for one in type(callback).__mro__ if name in vars(one)), object)
            if owner.__module__.partition(".")[0] not in ("forgather", "transformers", "builtins"):
                raise TrainingError(
                    f"optimizer_in_backward is true, and {type(callback).__name__} has {name}, when there would be no "
                    "gradients",
                    code="FG707",
                    hint="act in on_step_end, or remove optimizer_in_backward",
                ).about("args.optimizer_in_backward")


class RunStart:
    """The number of processes that the config requests, recorded when the trainer is constructed."""

    def __init__(self) -> None:
        # Read now: `Project` sets this context variable only while it builds.
        self._request = launcher_env.requested.get()

    def begin(
        self, world_size: int, device: torch.device, layout: Sequence[str] = (), model: nn.Module | None = None
    ) -> None:
        """Logs the number of processes, the device, the launcher, and the number of trainable parameters.

        Args:
            world_size: the number of processes.
            device: the device of this process.
            layout: further lines to log, which describe the parallel layout.
            model: the model. The number of its trainable parameters is logged if some are frozen.

        Raises:
            DistributedError: FG776 if the config requests several processes and there is a single one.
        """
        if (handler := current_handler()) is not None:
            handler.has_trainer = True
        self._refuse_alone(world_size)
        on = device if world_size == 1 else device.type
        # Logged as a warning: without logging configuration, Python shows warnings only.
        _log.warning("processes  %d on %s, started by %s", world_size, on, launcher_name())
        for line in layout:
            _log.warning("%s", line)
        if model is not None:
            trained, every = num_parameters(model, trainable=True), num_parameters(model)
            if trained < every:
                _log.warning("trainable  %s", format_share(trained, every))

    def _refuse_alone(self, world_size: int) -> None:
        request = self._request
        asked = resolve_process_count(request.processes) if request is not None else 1
        # Another number of processes is the launcher's choice; a single one is most often a forgotten launcher.
        if request is None or world_size > 1 or asked < 2:
            return
        name = request.config.removesuffix(".yaml")
        at = f"-p {os.path.relpath(request.project_dir)} " if request.project_dir != os.getcwd() else ""
        raise DistributedError(
            f"this run has one process, and config {request.config!r} requests {asked} "
            f"(meta.nproc_per_node is {request.processes}): a step would have fewer rows",
            code="FG776",
            hint=f"start it with `fgcli {at}-t {name} train`, or build it for one process: "
            f"Project({name!r}, ..., nproc_per_node=1)",
        )


def checkpoint_to_resume(args: TrainingArguments, storage: Storage, request: bool | str | None) -> Path | None:
    """Checks that the output folder is writable, and returns the checkpoint to resume from, or None.

    Args:
        args: the training arguments.
        storage: the object through which files are written and removed.
        request: true or "auto" for the newest intact checkpoint; the folder of a checkpoint; or None or false for no
            resume.

    Raises:
        TrainingError: FG817 if the run saves and the output folder is not writable.
        CheckpointError: FG601 to FG604 or FG607 if the requested checkpoint cannot be used, see `resolve_resume`.
    """
    output_dir = Path(args.output_dir)
    # Before hours of training, whose result could not be written.
    if args.save_strategy != "no":
        model_export.check_writable(storage, output_dir)
    folder = resume.resolve_resume(request, output_dir, args.allow_missing or (), storage=storage)
    if folder is None and args.allow_missing:
        _log.warning(
            "allow_missing has no effect: the run does not resume from a checkpoint (--resume or "
            "resume_from_checkpoint selects one)"
        )
    if folder is None and args.allow_changed:
        _log.warning("allow_changed has no effect: the run does not resume from a checkpoint")
    if folder is None and args.save_strategy != "no":
        resume.warn_of_earlier_run(output_dir)
    return folder


def rows_line(data: TrainBatches, eval_dataset: Any) -> str:
    """Returns the line about the rows of a run: how many are trained on and evaluated, per step and per epoch.

    Args:
        data: the training data.
        eval_dataset: the evaluation rows, a mapping from names to several sets of rows, or None.
    """
    sets = list(eval_dataset.values()) if isinstance(eval_dataset, Mapping) else [eval_dataset]
    # A stream has no length.
    sizes = [len(rows) if hasattr(rows, "__len__") else None for rows in sets if rows is not None]
    known = [size for size in sizes if size is not None]
    evaluated = f"{sum(known):,}" if len(known) == len(sizes) else "an unknown number"
    trained = "an unknown number" if data.num_rows is None else f"{data.num_rows:,}"
    ends, changes = data.epoch_ends(), data.accumulation.changes
    per_epoch = [f"{plural(next(ends), 'step')} {'in the first' if changes else 'per'} epoch"] if ends else []
    left_out = [f"the last {data.rows_left_out} of an epoch left out"] if data.rows_left_out else []
    what = f"{trained} to train on, {evaluated if sizes else 'none'} to evaluate"
    return f"rows       {what}; {', '.join([*_rows_per_step(data), *per_epoch, *left_out])}"


def _rows_per_step(data: TrainBatches) -> Iterator[str]:
    """Yields the number of rows of an optimizer step, for each part of a schedule of accumulation."""
    for start, accumulated in data.accumulation.entries:
        parts = {"": data.share.rows, "processes": data.share.size, "accumulated": accumulated}
        shown = " x ".join(f"{count} {name}".strip() for name, count in parts.items() if not name or count > 1)
        since = f" from {data.accumulation.unit.removesuffix('s')} {start} on" if start else " per step"
        yield f"{math.prod(parts.values()):,}{since}{f' ({shown})' if ' x ' in shown else ''}"


def profilers(args: TrainingArguments) -> list[ProfileCallback]:
    """Returns the callback of the training argument `profile`, if it is set."""
    return [ProfileCallback(**args.profile)] if args.profile else []


def num_steps_and_epochs(args: TrainingArguments, data: TrainBatches) -> tuple[int, int]:
    """Returns the number of optimizer steps and the number of epochs of a run. An incomplete epoch is counted.

    Args:
        args: the training arguments, whose `max_steps` and `num_train_epochs` are read.
        data: the training data, whose number of micro-batches per epoch and accumulation are read.
    """
    batches = data.num_batches
    # A stream has no known end: `TrainBatches` required `max_steps`.
    if batches is None:
        return args.max_steps, 1
    if args.max_steps > 0:
        return args.max_steps, data.accumulation.num_epochs(batches, args.max_steps)
    return data.accumulation.num_steps(batches, args.num_train_epochs), math.ceil(args.num_train_epochs)
