"""Compares the outputs of two models: their logits, and the tokens that they generate greedily.

Takes a model and prompts, and gives `Outputs`; `compare` gives the largest difference between two of them. An export
uses it to prove that the written model computes what the trained one does.

Shapes:
    T positions, V words, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from forgather.ml.random_state import forked_random

LIMIT = 1e-5
"""The largest difference between equal models in float32, per unit of the largest logit."""

_NEW_TOKENS = 16
_TEXTS = ("The", "Once upon a time there was", "def main(", "1, 2, 3,", "\u00fcber 100 %\n")
_QUESTION = [{"role": "user", "content": "What comes after one?"}]
_RANDOM_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a model for some prompts.

    Args:
        logits: the logits for each prompt, in float32.
        ids: the tokens that follow each prompt with greedy decoding; empty for a model that does not generate.

    Shapes:
        logits: (1, T, V) or (1, C) each.
    """

    logits: Sequence[Tensor]
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much the outputs of two models differ.

    Args:
        difference: the largest absolute difference of two logits.
        scale: the largest absolute logit, or 1 if all are smaller.
        prompts: the number of prompts.
        equal_ids: for how many prompts the generated tokens are equal; None if the models do not generate.
    """

    difference: float
    scale: float
    prompts: int
    equal_ids: int | None

    @property
    def is_equal(self) -> bool:
        """Whether the models are the same within the rounding of float32."""
        # The negation, so that a logit that is not a number fails.
        return self.difference <= LIMIT * self.scale and self.equal_ids in (None, self.prompts)

    def __str__(self) -> str:
        tokens = "" if self.equal_ids is None else f", greedy ids of {self.equal_ids} of {self.prompts} prompts equal"
        return f"logits differ by at most {self.difference:.1e}{tokens}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as data for JSON."""
        return {
            "logits_difference": self.difference,
            "largest_logit": self.scale,
            "allowed": LIMIT * self.scale,
            "prompts": self.prompts,
            "equal_greedy_ids": self.equal_ids,
        }


def takes_tokens(model: nn.Module) -> bool:
    """Returns whether a model is one of transformers whose input are the tokens of a text."""
    return isinstance(model, PreTrainedModel) and model.main_input_name == "input_ids"


def prompts_for(model: Any, tokenizer: Any = None, *, tokens: Iterable[int] = ()) -> list[Tensor]:
    """Returns prompts: texts and a question if there is a tokenizer, random tokens, and the given ones.

    Args:
        model: a model of transformers.
        tokenizer: the tokenizer of the model; None if there is none.
        tokens: tokens that a prompt has to contain, such as those whose rows were trained.

    Shapes:
        Returns tensors of shape (1, T).
    """
    words = int(model.get_input_embeddings().weight.shape[0])
    most = _most_positions(model)
    found: list[list[int]] = []
    if tokenizer is not None:
        found += [list(tokenizer(text)["input_ids"]) for text in _TEXTS]
        if getattr(tokenizer, "chat_template", None):
            found.append(list(tokenizer.apply_chat_template(_QUESTION, add_generation_prompt=True)["input_ids"]))
    with forked_random(0):
        found += [torch.randint(words, (_RANDOM_TOKENS,)).tolist() for _ in range(2)]
    # The last rows are those of added tokens.
    found.append(sorted({*range(max(0, words - 4), words), *list(tokens)[:_RANDOM_TOKENS]}))
    # Tokens that the model does not have are an error of the tokenizer, which is not what is compared here.
    usable = ([one for one in ids if 0 <= one < words][:most] for ids in found)
    return [torch.tensor([ids]) for ids in usable if ids]


def _most_positions(model: Any) -> int:
    """Returns the number of tokens that a prompt may have, so that the generated ones fit after it."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return max(1, positions - _NEW_TOKENS) if isinstance(positions, int) else 256


@torch.no_grad()
def outputs_of(model: Any, prompts: Sequence[Tensor]) -> Outputs:
    """Returns the logits and the greedily generated tokens of a model. The model is in evaluation mode afterwards.

    Args:
        model: a model of transformers, or one of peft around it.
        prompts: the prompts.

    Shapes:
        prompts: (1, T) each.
    """
    model.eval()
    config = model.config
    device = next(model.parameters()).device
    logits, ids = [], []
    for prompt in prompts:
        given = {"input_ids": prompt.to(device), "attention_mask": torch.ones_like(prompt).to(device)}
        more = {"decoder_input_ids": given["input_ids"]} if getattr(config, "is_encoder_decoder", False) else {}
        logits.append(model(**given, **more).logits.float().cpu())
        if model.can_generate():
            made = model.generate(**given, generation_config=_greedy(model, int(prompt.shape[1])))
            ids.append(made[0, 0 if more else prompt.shape[1] :].tolist())
    return Outputs(logits, ids)


def _greedy(model: Any, length: int) -> GenerationConfig:
    own = model.generation_config
    ends = own.eos_token_id
    first = ends[0] if isinstance(ends, list | tuple) and ends else ends
    positions = getattr(model.config, "max_position_embeddings", None)
    room = max(1, positions - length) if isinstance(positions, int) else _NEW_TOKENS
    pad = own.pad_token_id if own.pad_token_id is not None else first if isinstance(first, int) else 0
    made: Any = GenerationConfig
    settings: GenerationConfig = made(
        do_sample=False,
        num_beams=1,
        max_new_tokens=min(_NEW_TOKENS, room),
        eos_token_id=ends,
        pad_token_id=pad,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    return settings


def compare(expected: Outputs, found: Outputs) -> Comparison:
    """Returns how much two outputs differ.

    Args:
        expected: the outputs of the model that was trained.
        found: the outputs of the other model, for the same prompts.

    Example:
        >>> one = Outputs([torch.tensor([[0.5, 2.0]])], [[3, 4]])
        >>> compare(one, Outputs([torch.tensor([[0.5, 2.5]])], [[3, 4]])).difference
        0.5
    """
    pairs = list(zip(expected.logits, found.logits, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return Comparison(math.inf, 1.0, len(pairs), 0 if expected.ids else None)
    differences = [float((one - other).abs().max()) for one, other in pairs]
    # A maximum of Python would skip values that are not numbers.
    difference = math.inf if any(math.isnan(one) for one in differences) else max(differences, default=0.0)
    scale = max([1.0, *(float(one.abs().max()) for one, _ in pairs)])
    equal = [list(one) == list(other) for one, other in zip(expected.ids, found.ids, strict=False)]
    return Comparison(difference, scale, len(pairs), sum(equal) if expected.ids else None)
