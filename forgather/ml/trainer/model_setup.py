"""Builds a model and prepares it for training: TF32, activation checkpointing, compilation; and plans the run.

Preparation steps change how a model computes, never its weights. The other functions give what a run needs before its
first step: the model, the checkpoint to resume from, trackers, and the number of steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forgather.errors import TrainingError
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.log import get_logger
from forgather.ml.trainer import model_export, resume
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.data_loader import TrainBatches

Step = Callable[[nn.Module], None]


def preparation(args: TrainingArguments) -> list[Step]:
    """Returns the preparation steps that the arguments ask for, in order."""
    steps: list[Step] = []
    if args.tf32 is not None:
        steps.append(functools.partial(allow_tf32, allowed=args.tf32))
    if args.gradient_checkpointing:
        steps.append(functools.partial(recompute_activations, settings=args.gradient_checkpointing_kwargs or {}))
    if args.torch_compile:
        backend = args.torch_compile_backend or "inductor"
        compiles = compile_blocks if args.torch_compile_regions else compile_model
        # Compilation comes last: it has to see the forward methods that recompute activations.
        steps.append(functools.partial(compiles, backend=backend, mode=args.torch_compile_mode))
    return steps


def allow_tf32(model: nn.Module, *, allowed: bool) -> None:
    """Allows or forbids TF32 in float32 matrix products on CUDA. The setting is global to the process."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def recompute_activations(model: nn.Module, *, settings: Mapping[str, Any]) -> None:
    """Makes the backward pass recompute activations (activation checkpointing): same gradients, less memory.

    Models of transformers have a method for it. Of other models, each item of an outermost `nn.ModuleList`,
    `nn.ModuleDict` or `nn.Sequential` is recomputed as one unit.

    Args:
        model: is changed in place.
        settings: of `torch.utils.checkpoint.checkpoint`; `use_reentrant` is False by default.

    Raises:
        TrainingError: FG822 for a model without such units.
    """
    settings = {"use_reentrant": False, **settings}
    # transformers renamed the method; earlier releases and other models have the second name only.
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if callable(enable := getattr(model, f"{name}_enable", None)):
            enable(**{f"{name}_kwargs": settings})
            return
    units = units_of(model)
    if not units:
        raise TrainingError(
            f"gradient_checkpointing is on, and {type(model).__name__} has no nn.ModuleList or nn.Sequential",
            code="FG822",
            hint="keep the layers in an nn.ModuleList, give the model gradient_checkpointing_enable(), or turn it off",
        )
    for unit in units:
        # Only `forward` is replaced: wrapping the module would change the names of its weights.
        unit.forward = _recomputed(unit, unit.forward, settings)


def units_of(model: nn.Module) -> list[nn.Module]:
    """Returns the items with weights of each outermost `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential`."""
    units: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            units += [unit for unit in child.children() if next(unit.parameters(), None) is not None]
        else:
            units += units_of(child)
    return units


def _recomputed(unit: nn.Module, forward: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        # Without a backward pass there is nothing to recompute.
        if not (unit.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **settings, **kwargs)

    return recomputing_forward


def compile_model(model: nn.Module, *, backend: str, mode: str | None) -> None:
    """Compiles the model in place.

    Args:
        model: to compile.
        backend: of `torch.compile`.
        mode: of `torch.compile`; None for its default.

    Raises:
        TrainingError: FG823 for a backend that torch does not know.
    """
    _refuse_unknown(backend)
    # `nn.Module.compile` keeps the module; `torch.compile` would wrap it and prefix the names of its weights.
    model.compile(backend=backend, mode=mode)


def compile_blocks(model: nn.Module, *, backend: str, mode: str | None) -> None:
    """Compiles each repeated block of the model in place; the whole model if it has none.

    Args:
        model: to compile.
        backend: of `torch.compile`.
        mode: of `torch.compile`; None for its default.

    Raises:
        TrainingError: FG823 for a backend that torch does not know.
    """
    _refuse_unknown(backend)
    for unit in units_of(model) or [model]:
        unit.compile(backend=backend, mode=mode)


def _refuse_unknown(backend: str) -> None:
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise TrainingError(
            f"torch_compile_backend is {backend!r}",
            code="FG823",
            hint="one of: " + ", ".join(sorted(torch._dynamo.list_backends())),
        )


_log = get_logger(__name__)


def make_model(model: Any, model_init: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    """Returns the model to train; one that is built here is built after the seed was set.

    Args:
        model: a module, or a callable without arguments that returns one.
        model_init: returns the module, if `model` is None.
        seed: of the weights.

    Raises:
        TrainingError: FG801 if there is no module.
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


def checkpoint_to_resume(args: TrainingArguments, storage: Storage, request: bool | str | None) -> Path | None:
    """Returns the checkpoint to resume from, or None; checks first that the output folder is writable.

    Args:
        args: of the run.
        storage: does the file operations.
        request: true or "auto" for the newest intact checkpoint, a folder, or None.

    Raises:
        TrainingError: FG817 if the output folder is not writable.
        CheckpointError: FG601 to FG604 and FG607, see `resolve_resume`.
    """
    output_dir = Path(args.output_dir)
    if args.save_strategy != "no":
        model_export.check_writable(storage, output_dir)
    folder = resume.resolve_resume(request, output_dir, args.allow_missing or (), storage=storage)
    if folder is None and args.allow_missing:
        _log.warning(
            "allow_missing has no effect: the run goes on from no checkpoint (--resume, or resume_from_checkpoint, "
            "says from which one)"
        )
    if folder is None and args.allow_changed:
        _log.warning("allow_changed has no effect: the run goes on from no checkpoint")
    if folder is None and args.save_strategy != "no":
        resume.warn_of_earlier_run(output_dir)
    return folder


def trackers(args: TrainingArguments) -> list[Any]:
    """Returns the tracker callbacks that `report_to` names."""
    if not args.report_to:
        return []
    # Imported only here: the module imports every tracker that is installed.
    integrations = import_module("transformers.integrations")
    return [tracker() for tracker in integrations.get_reporting_integration_callbacks(args.report_to)]


def num_steps_and_epochs(args: TrainingArguments, data: TrainBatches) -> tuple[int, int]:
    """Returns the number of optimizer steps and of epochs of a run; an incomplete epoch counts as one.

    Args:
        args: `max_steps` and `num_train_epochs`.
        data: gives the optimizer steps per epoch.
    """
    per_epoch = data.updates_per_epoch
    # A stream has no known end: `TrainBatches` required `max_steps`.
    if per_epoch is None:
        return args.max_steps, 1
    if args.max_steps > 0:
        return args.max_steps, math.ceil(args.max_steps / per_epoch)
    return math.ceil(args.num_train_epochs * per_epoch), math.ceil(args.num_train_epochs)
