"""Whether a state is that of the class that a configuration names, so that `from_pretrained` reads it as it is.

Takes a model; gives why not, in words. Keeps true: transformers fills weights that it does not find with random numbers
and says so in a log alone, so a folder whose weights have other names must not look as if it could be loaded.
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


def misfit_of(model: nn.Module) -> str | None:
    """Returns why `from_pretrained` would not read the state of a model under its own names; None where it would."""
    model = getattr(model, "stands_for", model)
    if not isinstance(model, PreTrainedModel):
        return f"a {class_name(model)} is no model of transformers, and may hold one"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "adapters are part of them"
    if getattr(model, "hf_quantizer", None) is not None:
        return None  # whose names are made while it is read
    return _misfit(model)


def _misfit(model: PreTrainedModel) -> str | None:
    kind = user_class(model)
    try:
        bare = without_memory(kind, copy.deepcopy(model.config))
    except Exception:  # noqa: BLE001 - the border of a user's class: from_pretrained makes it in the same way
        return None
    return other_names(kind.__name__, bare.state_dict().keys(), model.state_dict().keys())


def without_memory(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Returns a model without weights; no random number of the run is drawn."""
    before = capture_rng()
    try:
        with torch.device("meta"):
            return kind(config)
    finally:
        restore_rng(before)


def other_names(kind: str, expected: Collection[str], found: Collection[str]) -> str | None:
    """Returns, in words, which weights of a state are not those of a class; None where all are."""
    unknown = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    if not unknown and not missing:
        return None
    name, what = (unknown[0], "is none of its weights") if unknown else (missing[0], "is not there")
    more = len(unknown) + len(missing) - 1
    return f"they are not those of {kind}: {name!r:.80} {what}" + (f", and {more} more names differ" if more else "")
