"""Noise on embedded inputs in training (NEFTune), which lets a model that is trained on instructions answer longer.

Takes a model that is placed on its devices; changes it in place. The noise is drawn from torch's random state.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from forgather.errors import TrainingError

_HOOK = "_noise_hook"
"""The attribute of the input embeddings that has the handle of the hook."""


def add_noise_to_embeddings(model: nn.Module, *, alpha: float) -> None:
    """Adds uniform noise to the output of the input embeddings in training, and none in evaluation (NEFTune).

    Args:
        model: the model, which is changed in place.
        alpha: the largest noise, times the square root of length times width of the output. Padding and all documents
            of a packed row count in the length.

    Raises:
        TrainingError: FG814 if the model does not say what its input embeddings are.

    Source:
        `transformers.integrations.neftune`, whose hook is used unchanged.
    """
    embeddings = _input_embeddings(model)
    if embeddings is None:
        raise TrainingError(
            f"neftune_noise_alpha is {alpha}, and {type(model).__name__} has no get_input_embeddings()",
            code="FG814",
            hint="give the model that method, or remove neftune_noise_alpha",
        ).about("args.neftune_noise_alpha")
    remove_noise_from_embeddings(model)
    vars(embeddings)["neftune_noise_alpha"] = alpha
    vars(embeddings)[_HOOK] = embeddings.register_forward_hook(neftune_post_forward_hook)


def remove_noise_from_embeddings(model: nn.Module) -> None:
    """Removes what `add_noise_to_embeddings` has added, if anything, as transformers does after a training.

    Args:
        model: the model, which is changed in place.
    """
    embeddings = _input_embeddings(model)
    if embeddings is not None and _HOOK in vars(embeddings):
        vars(embeddings).pop(_HOOK).remove()
        vars(embeddings).pop("neftune_noise_alpha")


def _input_embeddings(model: Any) -> nn.Module | None:
    try:
        embeddings = model.get_input_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embeddings if isinstance(embeddings, nn.Module) else None
