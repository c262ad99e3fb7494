"""Puts the kernels of the library Liger into a model of transformers.

The library skips a model or a setting that it does not know with a line in its log. Here each of them is an error, so
that a run has the kernels that its config names. The loss stays that of the loss rule, see `ml/losses.py`. A model
whose weights are present must give the same logits with the kernels as without.

Source:
    `liger_kernel.transformers._apply_liger_kernel_to_instance`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from forgather.errors import TrainingError, nearest
from forgather.ml.adapter_base import is_peft_model
from forgather.ml.log import get_logger
from forgather.ml.planned_model import is_planned

_log = get_logger(__name__)

# They replace the loss that the model computes from labels, and no rule calls a model with labels to get that loss.
_OF_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest difference of logits, relative to the largest logit, by the dtype of the weights."""


def use_liger_kernels(model: nn.Module, *, settings: Mapping[str, Any]) -> None:
    """Replaces parts of a model by Liger's kernels, in place.

    Args:
        model: the model, which may have an adapter.
        settings: which kernels are used, by the keywords of Liger's function for the model's type, such as `rope`.

    Raises:
        TrainingError: FG790 if there is no GPU, if Liger has no kernels for the model, or if it does not know a
            setting; FG791 if the logits are others with the kernels.
    """
    if not torch.cuda.is_available():
        if is_planned(model):
            _log.warning("Liger's kernels need a GPU: this plan is that of the model without them")
            return
        raise _refusal("use_liger_kernel is true, and Liger's kernels need a GPU with Triton", "remove it")
    library = import_module("liger_kernel.transformers.monkey_patch")
    wrapper: Any = model
    base = wrapper.get_base_model() if is_peft_model(model) else model
    apply = library.MODEL_TYPE_TO_APPLY_LIGER_FN.get(getattr(getattr(base, "config", None), "model_type", None))
    if apply is None or not isinstance(base, PreTrainedModel):
        raise _refusal(
            f"Liger has no kernels for {type(base).__name__}", "remove use_liger_kernel, or take a model that it knows"
        )
    check_settings(settings, inspect.signature(apply).parameters)
    known = {name: value for name, value in _OF_LOSSES.items() if name in inspect.signature(apply).parameters}
    before = logits_of_probe(base)
    apply(model=base, **known, **settings)
    compare_logits(before, logits_of_probe(base))


def check_settings(settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises an error if Liger does not know a setting, or if the setting is about the loss.

    Args:
        settings: the settings, by name.
        known: the names that Liger's function takes.

    Raises:
        TrainingError: FG790.
    """
    for name in settings:
        if name in _OF_LOSSES:
            raise _refusal(f"liger_kernel_config has {name}, and the loss rule computes the loss", "remove it")
        if name not in known or name == "model":
            names = [each for each in known if each != "model" and each not in _OF_LOSSES]
            raise _refusal(
                f"Liger's kernels for this model have no setting {name!r}", nearest(name, names) or "remove it"
            )


def logits_of_probe(model: PreTrainedModel) -> Tensor | None:
    """Returns the logits of a short row of token ids, or None for a model whose weights are not here yet.

    Weights that are all zero have other values meanwhile: without these, a kernel could leave out a new LoRA or a new
    bias, and change nothing.

    Shapes:
        Returns (1, T, V).
    """
    first = next(model.parameters())
    if first.device.type == "meta" or isinstance(first, FakeTensor):
        return None
    embeddings: Any = model.get_input_embeddings()
    ids_BT = torch.arange(16, device=first.device).remainder(embeddings.num_embeddings)[None]
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad(), _zeros_replaced(model):
            logits: Tensor = model(input_ids=ids_BT, use_cache=False).logits
            return logits
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _zeros_replaced(model: nn.Module) -> Iterator[None]:
    zeros = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.any()]
    try:
        for weight in zeros:
            weight.copy_(torch.linspace(-0.1, 0.1, weight.numel(), device=weight.device).view_as(weight))
        yield
    finally:
        for weight in zeros:
            weight.zero_()


def compare_logits(before: Tensor | None, after: Tensor | None) -> None:
    """Raises an error if a model gives other logits than before.

    Args:
        before: the logits of the model as it was; None if there were none.
        after: the logits of the changed model.

    Raises:
        TrainingError: FG791.
    """
    if before is None or after is None:
        return
    difference = ((after - before).abs().max() / before.abs().max().clamp_min(1e-30)).item()
    if not difference <= _TOLERANCE.get(before.dtype, 1e-4):
        raise TrainingError(
            f"with Liger's kernels, the logits of a probe differ by {difference:.2g} of the largest one",
            code="FG791",
            hint="switch kernels off one by one with liger_kernel_config, such as {rope: false}, to find the wrong one",
        ).about("args.use_liger_kernel")


def _refusal(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG790", hint=hint).about("args.use_liger_kernel")
