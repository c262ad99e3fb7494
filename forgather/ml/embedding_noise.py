"""Noise on embedded inputs in training (NEFTune), which lets a model that is trained on instructions answer longer.

Takes a model that is placed on its devices; changes it in place. The noise is drawn from torch's random state.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from forgather.errors import TrainingError


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
    try:
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        embeddings = None
    if not isinstance(embeddings, nn.Module):
        raise TrainingError(
            f"neftune_noise_alpha is {alpha}, and {type(model).__name__} has no get_input_embeddings()",
            code="FG814",
            hint="give the model that method, or remove neftune_noise_alpha",
        ).about("args.neftune_noise_alpha")
    vars(embeddings)["neftune_noise_alpha"] = alpha
    embeddings.register_forward_hook(neftune_post_forward_hook)
