"""Answers to several prompts at once; each answer is the one that its prompt has alone.

Takes a `Generator` and the token ids of prompts; gives an `Answer` for each. For a decoder, the batch is padded on the
left and continued in rounds, each by as many tokens as every unfinished row has room for. So no row, finished or not,
passes the last position of the model; and if the forward pass is a collective, all processes compute the same number of
tokens. If an encoder reads the prompts, they are padded on the right, as in training, and all answers have the same
room: one round is enough.

Shapes:
    B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forgather.ml.data.token_text import decoded
from forgather.ml.distributed import collectives
from forgather.ml.generation.encoder_decoder import answers_alone, encoded, has_encoder
from forgather.ml.generation.generator import Answer, Generator, Sampling
from forgather.ml.train_mode import sampling_mode
from forgather.rotary_types import rotary_type_by_length

_UNLIMITED = 2**31
_LOOKING_BACK: dict[str, float | None] = {
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "bad_words_ids": None,
    "guidance_scale": 1,
    "watermarking_config": None,
}
"""The value of each setting that has no effect, as None has none."""


def batch_answers(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_length: int | None = None,
    in_step: bool = False,
) -> list[Answer]:
    """Returns the answers to several prompts.

    Each answer is the one that `Generator.answer` returns for its prompt, except that a prompt without a position left
    has an empty answer. In a type with few digits, such as bfloat16, two tokens that are almost equally likely can
    change places, because sums are rounded in another order.

    Args:
        generator: the model and its tokenizer.
        prompts: the token ids of the prompts, which are not empty.
        sampling: how many tokens an answer may have; it must take the most likely token.
        max_length: the maximum number of tokens of prompt and answer together, or of a decoder with an encoder; see
            `Generator.room`. None for the model's positions.
        in_step: whether all processes must compute the same number of tokens, because the forward pass is a collective.
            Then every process must call this function, and one without prompts computes a prompt that nobody asked for.
    """
    assert sampling.is_greedy, "answers that are drawn depend on the other rows of a batch"  # noqa: S101
    stops = frozenset(generator.stop_ids)
    rows = []
    for prompt in prompts:
        room = generator.room(len(prompt), max_length)
        rows.append(_Row(list(prompt), sampling.max_new_tokens if room is None else min(sampling.max_new_tokens, room)))
    is_alone = _answers_alone(generator)
    with sampling_mode(generator.model, sampling.seed):
        while True:
            unfinished = [row for row in rows if not row.is_finished]
            together = unfinished[:1] if is_alone else unfinished
            room = min((row.room for row in together), default=_UNLIMITED)
            room = int(-collectives.all_max(-room)) if in_step else room
            if room == _UNLIMITED:
                break
            _continue(generator, together, room, stops, in_step=in_step)
    return [
        Answer(
            ids=tuple(row.ids),
            text=decoded(generator.tokenizer, row.ids),
            finish=generator.finish(row.ids, row.most, sampling),
        )
        for row in rows
    ]


def _answers_alone(generator: Generator) -> bool:
    """Returns whether rows are answered one by one."""
    if generator.has_encoder:
        return answers_alone(generator.model)
    return bool(looking_back(generator.model)) or _has_batch_dependent_rotary(generator.model)


def looking_back(model: Any) -> list[str]:
    """Returns the names of the model's generation settings whose effect depends on earlier tokens or on their number.

    Padding would change their effect, so answers of a model with such settings are generated one by one. The tokens of
    a decoder that has an encoder are not padded, so the list is empty.

    Args:
        model: a model that generates texts.
    """
    if has_encoder(model):
        return []
    settings = model.generation_config
    return [name for name, unused in _LOOKING_BACK.items() if getattr(settings, name, None) not in (None, unused)]


def _has_batch_dependent_rotary(model: Any) -> bool:
    """Returns whether the rotary embedding of a row depends on the longest row of its batch."""
    return rotary_type_by_length(vars(model.config.get_text_config())) is not None


@dataclass(slots=True)
class _Row:
    """A prompt and the tokens of its answer so far.

    Args:
        prompt: the token ids of the prompt.
        most: the number of tokens of the answer after which generation ends.
        ids: the token ids of the answer so far.
        has_stopped: whether the last of them is a stop token.
        is_whole: whether the answer is not continued, because it was generated in one round.
    """

    prompt: list[int]
    most: int
    ids: list[int] = field(default_factory=list)
    has_stopped: bool = False
    is_whole: bool = False

    @property
    def room(self) -> int:
        return self.most - len(self.ids)

    @property
    def is_finished(self) -> bool:
        return self.has_stopped or self.is_whole or self.room <= 0

    def add(self, ids: Sequence[int], stops: frozenset[int]) -> None:
        # What follows the stop token is padding, up to the end of the longest answer.
        last = next((place for place, id_ in enumerate(ids) if id_ in stops), None)
        self.has_stopped = last is not None
        self.ids += ids if last is None else ids[: last + 1]


def _continue(generator: Generator, rows: Sequence[_Row], room: int, stops: frozenset[int], *, in_step: bool) -> None:
    """Continues rows by at most `room` tokens. Without rows, it computes a prompt of one token."""
    settings = generator.settings(0, Sampling(max_new_tokens=room))
    texts = [row.prompt + row.ids for row in rows] or [[settings.pad_token_id]]
    given = _padded(texts, settings.pad_token_id, generator)
    more: dict[str, Any] = {"encoder_outputs": encoded(generator.model, given)} if generator.has_encoder else {}
    written = generator.model.generate(**given, **more, generation_config=settings, synced_gpus=in_step)
    begin = 1 if generator.has_encoder else given["input_ids"].shape[1]
    for row, new in zip(rows, written[: len(rows), begin:].tolist(), strict=True):
        row.add(new, stops)
        row.is_whole = generator.has_encoder


def _padded(texts: Sequence[Sequence[int]], pad: int, generator: Generator) -> dict[str, Tensor]:
    """Returns texts as tensors (B, T): padded after their end for an encoder, and before their beginning otherwise."""
    length = max(map(len, texts))
    device = next(generator.model.parameters()).device
    ids = torch.full((len(texts), length), pad, device=device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        place = slice(len(text)) if generator.has_encoder else slice(length - len(text), length)
        ids[row, place], mask[row, place] = torch.tensor(text, device=device), 1
    return {"input_ids": ids, "attention_mask": mask}
