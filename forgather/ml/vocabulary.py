"""Rows for tokens that were added to the vocabulary of a trained model.

Takes a model and the size of a tokenizer's vocabulary. The embeddings, and the output layer if there is one, get the
missing rows; each of them starts as the mean of the rows that were trained. Rows that exist do not change. The model
remembers its new rows, because an adapter has to train them: frozen, all new tokens would stay the same token.

Shapes:
    V words, H hidden units.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forgather.ml.log import get_logger
from forgather.ml.random_state import forked_random

_ATTRIBUTE = "_forgather_new_rows"
_log = get_logger(__name__)


def extend_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Gives a model a row for each token, in place. Nothing changes if there are enough rows.

    Args:
        model: a model whose weights are trained.
        size: the number of tokens.

    Source:
        `transformers.PreTrainedModel.resize_token_embeddings`. Difference: new rows are the mean itself, without a
        random part, so that a resumed run and an export make the same model again.
    """
    first: Any = model.get_input_embeddings()
    before = int(first.weight.shape[0])
    if size <= before:
        return
    with forked_random(0):
        model.resize_token_embeddings(size, mean_resizing=False)
    for name in vocabulary_layers(model):
        layer: Any = model.get_submodule(name)
        for values in (layer.weight, getattr(layer, "bias", None)):
            if values is not None and len(values) == size:
                _fill(values, before)
    vars(model)[_ATTRIBUTE] = range(before, size)
    _log.warning("the model gets %d rows for added tokens: %d to %d", size - before, before, size - 1)


@torch.no_grad()
def _fill(values: Tensor, before: int) -> None:
    """Sets the new rows to the mean of the others.

    Shapes:
        values: (V, H) or (V,).
    """
    # In float32, because a sum of many rows loses digits in half precision.
    values[before:] = values[:before].float().mean(0).to(values.dtype)


def new_rows(model: nn.Module) -> range:
    """Returns the numbers of the rows that a model got for added tokens; empty if it got none."""
    found: Any = vars(model).get(_ATTRIBUTE)
    return found if isinstance(found, range) else range(0)


def saves_embeddings(model: Any) -> Literal["auto", False]:
    """Returns the argument `save_embedding_layers` with which peft saves an adapter.

    By default, peft saves all rows of a model whose vocabulary has grown. The adapter has the new ones already.

    Args:
        model: a model of peft.
    """
    return False if new_rows(model.get_base_model()) else "auto"


def save_settings(model: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments for `save_pretrained` of a model of peft; empty for another model.

    Args:
        model: the model.
        weights: its complete (not sharded) tensors by name.
    """
    peft = sys.modules.get("peft")  # a model of peft exists only if peft is imported; importing it is slow
    if peft is None or not isinstance(model, peft.PeftModel):
        return {}
    return {"state_dict": dict(weights), "save_embedding_layers": saves_embeddings(model)}


def vocabulary_layers(model: Any) -> list[str]:
    """Returns the names of the layers that have a row for each token: the embeddings, and an output layer of its own.

    Args:
        model: a model of transformers.
    """
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = [embeddings] + ([output] if output is not None and output.weight is not embeddings.weight else [])
    return [name for layer in wanted for name, module in model.named_modules() if module is layer][: len(wanted)]
