"""Computes the linear layers of a model in float8, with torchao.

The layers inside the repeated blocks become torchao's `Float8Linear`: their products are computed in float8, with
scales found from the values of each call, and their weights stay as they are. The output head, the embeddings and
everything outside the blocks keep the precision of the run. Names and shapes of weights do not change, so checkpoints
fit a run in another precision.

The scales of a call depend on its rows, so the losses of several ranks equal those of one process up to the rounding of
float8, not beyond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import import_module

import torch
from torch import nn

from forgather.errors import TrainingError
from forgather.ml.activation_checkpointing import repeated_blocks
from forgather.ml.adapter_base import is_peft_model
from forgather.ml.log import get_logger
from forgather.ml.planned_model import is_planned

_log = get_logger(__name__)

_MULTIPLE = 16
"""Hardware multiplies float8 matrices whose sizes are multiples of this."""


def compute_in_float8(model: nn.Module, *, recipe: str, exclude: Sequence[str], emulate: bool) -> None:
    """Replaces the linear layers in the blocks of a model by layers that compute in float8, in place.

    Args:
        model: the model.
        recipe: the name of torchao's recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        exclude: parts of names of layers that keep their precision.
        emulate: whether products are computed in a higher precision from values that were rounded to float8, on any
            device.

    Raises:
        TrainingError: FG792 if the device does not multiply float8 matrices; FG793 if torchao is missing, no layer is
            left to convert, a name is that of no layer, the model has an adapter, or the sizes of a layer are no
            multiples of 16.
    """
    if is_planned(model):
        _log.warning("fp8 is left out of this plan: its products take less time, and its weights the same memory")
        return
    if not emulate and not _device_multiplies_float8():
        raise TrainingError(
            f"fp8 is {recipe}, and {_device_name()} does not multiply float8 matrices",
            code="FG792",
            hint="set fp8_emulate: true to try it out slowly, or take a GPU from the Hopper generation on",
        ).about("args.fp8")
    names = _chosen_layers(model, exclude)
    try:
        torchao = import_module("torchao.float8")
    except ModuleNotFoundError as missing:
        raise _refusal(f"fp8 is {recipe}, and torchao is not installed", "pip install torchao") from missing
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    # The number of tokens of a batch is an inner size of the gradients of weights, and may be any number.
    config = dataclasses.replace(config, emulate=emulate, pad_inner_dim=True)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)


def _chosen_layers(model: nn.Module, exclude: Sequence[str]) -> frozenset[str]:
    """Returns the names of the linear layers in the blocks of a model, without those that are excluded."""
    if is_peft_model(model):
        raise _refusal("fp8 with an adapter: the frozen layers would not be those that were adapted", "remove fp8")
    blocks = {id(part) for block in repeated_blocks(model) for part in block.modules()}
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in blocks
    }
    for part in exclude:
        if not any(part in name for name, module in model.named_modules() if isinstance(module, nn.Linear)):
            raise _refusal(f"fp8_exclude has {part!r}, and no linear layer has it in its name", "remove it")
    chosen = {name: module for name, module in linear.items() if not any(part in name for part in exclude)}
    if not chosen:
        raise _refusal(f"no linear layer in a block of {type(model).__name__} would compute in fp8", "remove fp8")
    for name, module in chosen.items():
        if type(module) is not nn.Linear:
            raise _refusal(
                f"{name} is a {type(module).__name__}, which has no form in float8", f"add {name!r} to fp8_exclude"
            )
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            raise _refusal(
                f"{name} has {module.in_features} inputs and {module.out_features} outputs, and fp8 needs multiples of "
                f"{_MULTIPLE}",
                f"add {name.rpartition('.')[2]!r} to fp8_exclude",
            )
    return frozenset(chosen)


def _device_multiplies_float8() -> bool:
    # Ada (8.9) and Hopper (9.0) are the first generations with float8.
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this processor"


def _refusal(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG793", hint=hint).about("args.fp8")
