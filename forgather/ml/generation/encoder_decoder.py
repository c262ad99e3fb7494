"""Models with an encoder and a decoder: with which token their answers begin, and what the encoder makes of a batch.

The encoder reads the source, and the decoder writes the answer after a first token of its own. Training takes that
token from the labels; generation takes it from the generation settings. `refuse_other_beginning` compares the two.

Shapes:
    B rows, S tokens of the longest source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from forgather.errors import TrainingError
from forgather.ml.model_class import class_name

_SAME_IN_BATCHES = {
    *("t5", "mt5", "umt5"),
    *("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small"),
}
"""The `model_type` of the models whose padded sources are proven to change nothing. Others answer row by row."""

_OF_THE_SOURCE: dict[str, float | None] = {
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "watermarking_config": None,
}
"""Settings that read the tokens of the source with its padding, by the value that has no effect."""


def has_encoder(model: Any) -> bool:
    """Returns whether an encoder reads the prompt of a model."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def answers_alone(model: Any) -> bool:
    """Returns whether a source has to be answered without other rows, because padding could change the answer.

    Args:
        model: a model with an encoder.
    """
    settings = model.generation_config
    used = any(getattr(settings, name, None) not in (None, unused) for name, unused in _OF_THE_SOURCE.items())
    return used or model.config.model_type not in _SAME_IN_BATCHES


def first_token(model: Any) -> int | None:
    """Returns the token with which the decoder begins when it generates; None if the settings name none, or several."""
    settings = model.generation_config
    # As `generate` does: the begin-of-text token is taken if there is no other one.
    found = settings.decoder_start_token_id if settings.decoder_start_token_id is not None else settings.bos_token_id
    return found if isinstance(found, int) else None


def obstacle(model: Any) -> tuple[str, str] | None:
    """Returns why a model with an encoder writes no answers and what can be done, or None.

    Args:
        model: a model that has a method `generate`.
    """
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return f"the encoder of {class_name(model)} reads {model.main_input_name} and no text", "evaluate its loss"
    if first_token(model) is None:
        found = model.generation_config.decoder_start_token_id
        what = "names no token with which the decoder begins" if found is None else f"names several: {found}"
        return (
            f"the generation config of {class_name(model)} {what}",
            "set decoder_start_token_id in the configuration of the model",
        )
    return None


def refuse_other_beginning(model: Any, targets: Sequence[Sequence[int]]) -> None:
    """Raises an error if answers begin with other tokens than the targets from which the model learns.

    Args:
        model: a model with an encoder.
        targets: the token ids of targets, which are the labels of training.

    Raises:
        TrainingError: FG988.
    """
    forced = model.generation_config.forced_bos_token_id
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    for number, target in enumerate(targets):
        if forced is not None and target[0] != forced:
            raise _unlike(
                f"forced_bos_token_id makes every answer begin with token {forced}, and a target begins with token "
                f"{target[0]} (row {number})",
                "set forced_bos_token_id of the model's generation_config to the token with which targets begin, or to "
                "null",
            )
        if number == 0:
            labels = torch.tensor([list(target)])
            own = model.config.decoder_start_token_id
            begin = int(shifted(labels=labels)[0, 0]) if callable(shifted) else own
            if begin != first_token(model):
                raise _unlike(
                    f"the decoder begins with token {begin} in training, and with token {first_token(model)} when it "
                    "generates",
                    f"set decoder_start_token_id of the model's generation_config to {begin}",
                )


def _unlike(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG988", hint=hint).about("model")


def encoded(model: Any, source: Mapping[str, Tensor]) -> BaseModelOutput:
    """Returns what the encoder makes of a batch, computed by a forward pass of the whole model.

    `generate` would call the encoder by itself. Where weights are sharded, only the forward pass of the whole model
    gathers those that belong to no layer, such as the embeddings.

    Args:
        model: a model with an encoder.
        source: `input_ids` and `attention_mask`.

    Shapes:
        source: (B, S) each.
    """
    ids = source["input_ids"]
    begin = torch.full((len(ids), 1), first_token(model) or 0, device=ids.device)
    return BaseModelOutput(model(**source, decoder_input_ids=begin, use_cache=False).encoder_last_hidden_state)
