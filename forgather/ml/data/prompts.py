"""Prompts for text samples: the first tokens of documents in a data set.

The inputs are rows of token ids and the tokenizer that made them; the output is texts. Equal rows give equal prompts.
Only the first rows are read. A data set without token ids gives the empty prompt, with which a model starts a new
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from forgather.ml.argument_values import refuse_wrong_values

_ROWS_READ = 256


def beginnings(dataset: Any, tokenizer: Any, count: int = 3, num_tokens: int = 8) -> list[str]:
    """Returns the beginnings of the first documents of a data set, as prompts for text samples.

    Args:
        dataset: a data set of rows with `input_ids`, usually the evaluation set. If it is a mapping of data sets, the
            first one is used. A streaming data set is not read, because reading would consume the rows.
        tokenizer: the tokenizer that made the rows.
        count: the maximum number of prompts.
        num_tokens: the maximum length of each prompt in tokens.

    Returns:
        Distinct texts, or [""] if there are none.
    """
    refuse_wrong_values("data:beginnings", locals())
    if isinstance(dataset, Mapping) and dataset:
        dataset = next(iter(dataset.values()))
    found: dict[str, None] = {}
    for tokens in _documents(dataset, tokenizer, num_tokens):
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        # A dict keeps the order and drops duplicates; a prompt of blanks only would show nothing.
        if text.strip():
            found[text] = None
        if len(found) == count:
            break
    return list(found) or [""]


def _documents(dataset: Any, tokenizer: Any, num_tokens: int) -> Iterator[list[int]]:
    """Yields the first tokens of each document that starts in the first rows of a data set.

    A document that has fewer than `num_tokens` tokens and does not end in the row is left out.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not hasattr(tokenizer, "decode"):
        return
    end = getattr(tokenizer, "eos_token_id", None)
    begins = True
    for number in range(min(len(dataset), _ROWS_READ)):
        row = dataset[number]
        ids = row.get("input_ids") if isinstance(row, Mapping) else None
        if ids is None:
            return
        tokens = [int(token) for token in ids]
        ends = [place + 1 for place, token in enumerate(tokens) if token == end]
        for begin, after in pairwise([*([0] if begins else []), *ends, len(tokens)]):
            document = [token for token in tokens[begin:after] if token != end]
            if document and (len(document) >= num_tokens or after in ends):
                yield document[:num_tokens]
        # A row continues the document of the row before, unless that row ended with the end-of-text token.
        begins = bool(ends) and ends[-1] == len(tokens)
