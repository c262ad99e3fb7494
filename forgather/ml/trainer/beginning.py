"""How a run begins: with which model, from which checkpoint, with which trackers, for how many steps.

Takes arguments and what a config gives; gives what the trainer begins with. Keeps true: nothing is trained here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from forgather.errors import TrainingError
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.log import get_logger
from forgather.ml.trainer import resumed, saving
from forgather.ml.trainer.args import TrainingArguments
from forgather.ml.trainer.batches import TrainBatches

_log = get_logger(__name__)


def make_model(model: Any, model_init: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """Returns the model to train, made after the seed was set where it is made here.

    Raises:
        TrainingError: FG801 where there is none.
    """
    make = model_init if model is None else None if isinstance(model, nn.Module) else model
    if make is not None:
        seed_everything(seed)
        model = make()
    if not isinstance(model, nn.Module):
        found = "there is no model" if model is None else f"the model is a {type(model).__name__}"
        raise TrainingError(
            found, code="FG801", hint="give the trainer a torch.nn.Module, or model_init that gives one"
        )
    return model


def begin_from(args: TrainingArguments, storage: Storage, request: bool | str | None) -> Path | None:
    """Returns the checkpoint to go on from, and looks at the folder that will be written to."""
    output_dir = Path(args.output_dir)
    if args.save_strategy != "no":
        saving.check_writable(storage, output_dir)
    folder = saving.resolve_resume(request, output_dir, args.allow_missing or (), storage=storage)
    if folder is None and args.allow_missing:
        _log.warning(
            "allow_missing has no effect: the run goes on from no checkpoint (--resume, or resume_from_checkpoint, "
            "says from which one)"
        )
    if folder is None and args.allow_changed:
        _log.warning("allow_changed has no effect: the run goes on from no checkpoint")
    if folder is None and args.save_strategy != "no":
        resumed.mention_earlier_run(output_dir)
    return folder


def trackers(args: TrainingArguments) -> list[Any]:
    """Returns the callbacks of the trackers that the arguments name."""
    if not args.report_to:
        return []
    # Looked up when it is needed: it brings every tracker that is installed.
    integrations = import_module("transformers.integrations")
    return [tracker() for tracker in integrations.get_reporting_integration_callbacks(args.report_to)]


def extent(args: TrainingArguments, data: TrainBatches) -> tuple[int, int]:
    """Returns the number of updates and of (begun) epochs of a run."""
    per_epoch = data.updates_per_epoch
    if per_epoch is None:
        return args.max_steps, 1
    if args.max_steps > 0:
        return args.max_steps, math.ceil(args.max_steps / per_epoch)
    return math.ceil(args.num_train_epochs * per_epoch), math.ceil(args.num_train_epochs)
