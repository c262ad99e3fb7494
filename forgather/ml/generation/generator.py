"""Answers: how tokens are chosen, and the generation of one answer from the token ids of a prompt.

Takes a model of transformers or peft with its tokenizer, and the ids of a prompt; gives an `Answer`. The tokens are
those of the model's own `generate`, with the model's saved generation settings, except that the most likely token is
taken unless a temperature is given. Generation stops at the end of a turn, at the end of a text, and at the last
position of the model. `generation/batch.py` generates several answers together.

A decoder continues the prompt. If the model has an encoder, the encoder reads the prompt (the source), and the answer
is what the decoder writes after its own first token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from forgather.errors import TrainingError
from forgather.ml.data.chat_template import stop_token_ids
from forgather.ml.data.token_text import decoded
from forgather.ml.generation.encoder_decoder import has_encoder
from forgather.ml.generation.prompt import PromptError
from forgather.ml.train_mode import sampling_mode

MAX_NEW_TOKENS = 256
STOP, LENGTH, CONTEXT, INTERRUPTED = "stop", "length", "context", "interrupted"
_SEEDS = 2**63


class SamplingError(TrainingError, ValueError):
    """Raised if the settings of sampling are not allowed, or contradict one another."""

    code = "FG925"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: the temperature of the distribution from which tokens are drawn. 0 takes the most likely token;
            None is 1 if `top_p` or `top_k` is given, and 0 otherwise.
        top_p: the share of the probability that the tokens to draw from have together; None for all tokens.
        top_k: the number of most likely tokens to draw from; None for all tokens.
        seed: the seed of the draws.
        max_new_tokens: the maximum number of tokens of an answer.

    Raises:
        SamplingError: FG925.

    Example:
        >>> Sampling().is_greedy, Sampling(top_p=0.9).is_greedy
        (True, False)
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    max_new_tokens: int = MAX_NEW_TOKENS

    def __post_init__(self) -> None:
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"the temperature is {self.temperature}", hint="0 or above")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p is {self.top_p}", hint="a share of the probability, above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingError(f"top-k is {self.top_k}", hint="a number of tokens, at least 1")
        if self.max_new_tokens < 1:
            raise SamplingError(f"max-new-tokens is {self.max_new_tokens}", hint="a number of tokens, at least 1")
        if not 0 <= self.seed < _SEEDS:
            raise SamplingError(f"the seed is {self.seed}", hint="a number from 0 to 2**63 - 1")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise SamplingError(
                "temperature 0 takes the most likely token, so top-p and top-k have no effect",
                hint="leave out --temperature 0, or --top-p and --top-k",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that the seed has no effect."""
        return not self.temperature and self.top_p is None and self.top_k is None

    def numbered(self, number: int) -> Sampling:
        """Returns the same choice with the seed of a later answer, so that equal answers do not repeat.

        Args:
            number: the number of answers before.
        """
        return replace(self, seed=(self.seed + number) % _SEEDS)

    def as_settings(self) -> dict[str, Any]:
        """Returns the settings of transformers' `GenerationConfig` that this choice determines."""
        if self.is_greedy:
            # None, because transformers warns about a temperature that has no effect.
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        temperature = 1.0 if self.temperature is None else float(self.temperature)
        # 1 and 0 leave no token out; None would be transformers' own limit of 50 tokens.
        return {
            "do_sample": True,
            "temperature": temperature,
            "top_p": float(self.top_p or 1),
            "top_k": self.top_k or 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model generated.

    Args:
        ids: the token ids after the prompt, with the token at which generation stopped.
        text: the text of the ids without special tokens.
        finish: "stop" at the end of a turn or a text, "length" after the maximum number of tokens, "context" at the
            last position of the model, "interrupted" if the user stopped it.
    """

    ids: tuple[int, ...]
    text: str
    finish: str


class Generator:
    """Generates answers with a model.

    Args:
        model: a model of transformers that continues texts, or writes texts from texts, or peft's model around one.
        tokenizer: the tokenizer.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt."""
        return has_encoder(self.model)

    @property
    def last_position(self) -> int | None:
        """The number of positions of the model, or None if the model names no limit. An encoder has as many."""
        config = self.model.config if self.has_encoder else self.model.config.get_text_config()
        found = getattr(config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def room(self, num_prompt: int, max_length: int | None = None) -> int | None:
        """Returns the number of tokens that an answer may have: 0 if the prompt is too long, None without a limit.

        Args:
            num_prompt: the number of tokens of the prompt.
            max_length: the maximum number of tokens of prompt and answer together; with an encoder, of the tokens of
                the decoder, whose first one is not a part of the answer. None for the model's positions.
        """
        limits = [limit for limit in (self.last_position, max_length) if limit is not None]
        if not limits:
            return None
        if not self.has_encoder:
            return max(0, min(limits) - num_prompt)
        is_too_long = self.last_position is not None and num_prompt > self.last_position
        return 0 if is_too_long else max(0, min(limits) - 1)

    @property
    def stop_ids(self) -> list[int]:
        """The ids at which generation stops: those of the tokenizer, and those in the model's generation settings."""
        own = self.model.generation_config.eos_token_id
        ids = [own] if isinstance(own, int) else list(own or ())
        return list(dict.fromkeys([*stop_token_ids(self.tokenizer), *ids]))

    def settings(self, num_prompt: int, sampling: Sampling) -> GenerationConfig:
        """Returns the generation settings for a prompt: those that were saved with the model, with the given choice.

        Args:
            num_prompt: the number of tokens of the prompt.
            sampling: how tokens are chosen.

        Raises:
            PromptError: FG921 if the model has no position left after the prompt.
        """
        found: GenerationConfig = copy.deepcopy(self.model.generation_config)
        room, count = self.room(num_prompt), sampling.max_new_tokens
        if room is not None:
            if not room:
                places = "its encoder" if self.has_encoder else "prompt and answer"
                raise PromptError(
                    f"the prompt has {num_prompt} tokens, and the model has {self.last_position} positions for "
                    f"{places}",
                    code="FG921",
                    hint="give a shorter prompt",
                )
            count = min(count, room)
        pad = self.tokenizer.pad_token_id
        changes = {**sampling.as_settings(), "max_new_tokens": count, "max_length": None}
        # A search with several beams does not take the most likely token.
        changes |= {"num_return_sequences": 1, "num_beams": 1}
        changes |= {"eos_token_id": self.stop_ids or None, "pad_token_id": 0 if pad is None else pad}
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    def answer(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        write: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Answer:
        """Returns the answer to a prompt. The random states and the mode of the model do not change.

        Args:
            prompt_ids: the token ids of the prompt.
            sampling: how tokens are chosen.
            write: a function that gets each piece of the text as soon as it is complete; None to get none.
            stopped: a function that returns whether generation has to stop before the next token, or None.

        Raises:
            PromptError: FG921 if the prompt is too long; FG924 if it has a token that the model does not know.
        """
        settings = self.settings(len(prompt_ids), sampling)
        self._refuse_unknown_tokens(prompt_ids)
        inputs = torch.tensor([list(prompt_ids)], device=next(self.model.parameters()).device)
        halt = _Halt(stopped or bool)
        pieces = _Pieces(self.tokenizer, write) if write is not None else None
        with sampling_mode(self.model, sampling.seed):
            # A mask of ones, because transformers otherwise guesses it from the padding id, which may be a real token.
            written = self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([halt]),
                streamer=pieces,
            )
        ids = tuple(written[0, 1 if self.has_encoder else len(prompt_ids) :].tolist())
        finish = self.finish(ids, settings.max_new_tokens, sampling)
        if halt.has_stopped and finish != STOP:
            finish = INTERRUPTED
        return Answer(ids=ids, text=decoded(self.tokenizer, ids), finish=finish)

    def _refuse_unknown_tokens(self, prompt_ids: Sequence[int]) -> None:
        rows = len(self.model.get_input_embeddings().weight)
        unknown = next((id_ for id_ in prompt_ids if id_ >= rows), None)
        if unknown is not None:
            token = self.tokenizer.convert_ids_to_tokens(unknown)
            raise PromptError(
                f"the tokenizer makes token {unknown} ({token!r}) of the prompt, and the model has {rows} tokens",
                code="FG924",
                hint="the tokenizer in the folder is not that of the model: train with that of the model",
            )

    def finish(self, ids: Sequence[int], most: int, sampling: Sampling) -> str:
        """Returns why an answer ended: "stop", "length" or "context", see `Answer`.

        Args:
            ids: the token ids of the answer.
            most: the number of tokens that it could have. `forced_eos_token_id` makes a stop token the last of them.
            sampling: how tokens were chosen.
        """
        is_cut = len(ids) >= most and self.model.generation_config.forced_eos_token_id is not None
        if ids and ids[-1] in self.stop_ids and not is_cut:
            return STOP
        return LENGTH if len(ids) >= sampling.max_new_tokens else CONTEXT


class _Halt(StoppingCriteria):
    """Stops generation when a function says so."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self.has_stopped = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns whether each row is complete.

        Shapes:
            input_ids: (1, T). Returns (1,).
        """
        self.has_stopped = self.has_stopped or self._stopped()
        return torch.full((len(input_ids),), self.has_stopped, dtype=torch.bool, device=input_ids.device)


class _Pieces(BaseStreamer):
    """Gives each piece of the text to a function as soon as it is complete; together they are the text of the answer.

    All tokens are decoded each time, because the text of a token may depend on those before it: a letter may consist of
    several tokens, and some tokenizers leave out a blank at the beginning of what they decode.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._ids: list[int] | None = None
        self._written = ""

    def put(self, value: Tensor) -> None:
        """Takes the tokens of the prompt, and then those of the answer."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = decoded(self._tokenizer, self._ids)
        # The replacement character stands for a letter whose last token is still missing.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._send(text)

    def end(self) -> None:
        """Gives the rest of the text."""
        self._send(decoded(self._tokenizer, self._ids or []))

    def _send(self, text: str) -> None:
        if len(text) > len(self._written) and text.startswith(self._written):
            self._write(text[len(self._written) :])
            self._written = text
