"""The tokens of a rendered conversation, and where its answers begin and end in them.

Takes a rendered conversation with the ranges of its answers in characters; gives token ids and the ranges in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from forgather.ml.data.chat_template import Rendered
from forgather.ml.data.data_errors import DataError


class ChatTokens(NamedTuple):
    """The tokens of one conversation.

    Args:
        ids: the token ids.
        turns: the first position and the position after the last one of each answer.
    """

    ids: list[int]
    turns: list[tuple[int, int]]


def chat_tokens(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> ChatTokens | None:
    """Returns the token ids of a rendered conversation and the positions of its answers.

    The tokens before an answer are those of the same text without the answer, which is the prompt from which a model
    generates. Returns None if a token crosses the beginning of an answer and cannot be divided there.

    Args:
        tokenizer: the tokenizer.
        rendered: the conversation, from `render`.
    """
    cuts = [cut for turn in rendered.turns for cut in turn]
    borders = [0, *cuts, len(rendered.text)]
    whole, *parts = _ids(tokenizer, [rendered.text, *(rendered.text[a:b] for a, b in pairwise(borders))])
    # Usually the tokens of the parts are those of the whole, and each part ends at a border.
    if [id_ for part in parts for id_ in part] == whole:
        ends = _running_sum(parts)
        return ChatTokens(whole, _pairs(ends))
    # Some tokenizers treat the beginning of each text in a special way (a blank before it), or let a special token take
    # the blanks after it. What counts is that the text up to the border has the same tokens.
    before = _ids(tokenizer, [rendered.text[:cut] for cut in cuts])
    if all(whole[: len(ids)] == ids for ids in before):
        return ChatTokens(whole, _pairs([len(ids) for ids in before]))
    # A token joins the end of the prompt to the beginning of the answer: a model that generates cannot produce it.
    divided = [id_ for part in parts for id_ in part]
    if tokenizer.decode(divided) == tokenizer.decode(whole):
        return ChatTokens(divided, _pairs(_running_sum(parts)))
    return None


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    # The template has written the special tokens, so that the tokenizer must not add its own.
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, **options)["input_ids"] if texts else []
    return found


def _running_sum(parts: Sequence[Sequence[int]]) -> list[int]:
    ends, total = [], 0
    for part in parts[:-1]:
        total += len(part)
        ends.append(total)
    return ends


def _pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ends[::2], ends[1::2], strict=True))


def until_stop(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], turn: tuple[int, int], stops: frozenset[int]
) -> tuple[int, int]:
    """Returns the positions of an answer up to its last stop token; only blanks may come after that token.

    Args:
        tokenizer: the tokenizer.
        ids: the token ids of the conversation.
        turn: the first position of the answer and the position after the last one.
        stops: the ids at which generation stops.

    Raises:
        DataError: FG895 if the answer does not end with one of these tokens.
    """
    begin, end = turn
    last = next((place for place in range(end - 1, begin - 1, -1) if ids[place] in stops), None)
    if last is None or str(tokenizer.decode(ids[last + 1 : end])).strip():
        found = str(tokenizer.decode(ids[max(begin, end - 3) : end]))
        raise DataError(
            f"a marked answer ends with {found!r}, at which generation does not stop",
            code="FG895",
            hint="end each answer with the same special token, before {% endgeneration %}",
        )
    return begin, last + 1
