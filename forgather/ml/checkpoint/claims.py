"""Checks whether a model's state has the weight names that `from_pretrained` expects for the model's class.
 transformers fills weights that it does not find with random numbers and only logs a warning. A folder whose weights
have other names must therefore not look like a loadable model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.model_class import class_name, user_class


def load_mismatch(model: nn.Module) -> str | None:
    """Returns why `from_pretrained` could not load a model's state under its own weight names; None where it could.

    Args:
        model: the model whose `state_dict()` is saved. A proxy with a `stands_for` attribute is replaced by that model.
    """
    # With pipeline parallelism the strategy holds a proxy; class and configuration are those of the whole model.
    model = getattr(model, "stands_for", model)
    if not isinstance(model, PreTrainedModel):
        return f"a {class_name(model)} is not a model of transformers, and may contain one"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "they include adapters"
    # A quantizer renames weights while it loads them, so the names of an unloaded model prove nothing.
    if getattr(model, "hf_quantizer", None) is not None:
        return None
    return _class_mismatch(model)


def _class_mismatch(model: PreTrainedModel) -> str | None:
    kind = user_class(model)
    try:
        # A copy, because a constructor may change the configuration that it is given.
        bare = model_on_meta(kind, copy.deepcopy(model.config))
    except Exception:  # noqa: BLE001 - the border of a user's class: from_pretrained makes it in the same way
        return None
    return weight_name_mismatch(kind.__name__, bare.state_dict().keys(), model.state_dict().keys())


def model_on_meta(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Returns a model on the meta device, without weights, and leaves the state of every random generator as it was.

    Args:
        kind: the model class.
        config: the configuration that the class is constructed with.
    """
    # Constructors draw initial weights even on the meta device. Those draws must not shift the random numbers of the
    # run.
    before = capture_rng()
    try:
        with torch.device("meta"):
            return kind(config)
    finally:
        restore_rng(before)


def weight_name_mismatch(kind: str, expected: Collection[str], found: Collection[str]) -> str | None:
    """Returns a description of the first weight name that differs between two states; None where the names are equal.

    Args:
        kind: name of the model class, for the message.
        expected: the weight names of the class.
        found: the weight names of the state.
    """
    unknown = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    if not unknown and not missing:
        return None
    name, what = (unknown[0], "is not one of its weights") if unknown else (missing[0], "is missing")
    more = len(unknown) + len(missing) - 1
    return f"they are not those of {kind}: {name!r:.80} {what}" + (f", and {more} more names differ" if more else "")
