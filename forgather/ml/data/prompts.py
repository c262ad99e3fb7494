"""Prompts for text samples: how documents of a data set begin.

Takes rows of token ids and their tokenizer; gives texts. Keeps true: the same rows give the same prompts; nothing but
the first rows is read, and rows that are no token ids give the empty prompt, with which a model begins a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

_ROWS_READ = 256


def beginnings(dataset: Any, tokenizer: Any, count: int = 3, num_tokens: int = 8) -> list[str]:
    """Returns how the first documents of a data set begin, each as a prompt for a text sample.

    Args:
        dataset: rows with `input_ids`, as the model is evaluated on; of a mapping of data sets, the first. Rows of a
            stream are not read.
        tokenizer: what made the rows.
        count: how many prompts.
        num_tokens: of each prompt.

    Returns:
        Texts that differ; [""] where there are none.
    """
    if isinstance(dataset, Mapping) and dataset:
        dataset = next(iter(dataset.values()))
    found: dict[str, None] = {}
    for tokens in _documents(dataset, tokenizer, num_tokens):
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        if text.strip():
            found[text] = None
        if len(found) == count:
            break
    return list(found) or [""]


def _documents(dataset: Any, tokenizer: Any, num_tokens: int) -> Iterator[list[int]]:
    """Yields how each document begins that begins in the first rows; one whose row ends too soon is left out."""
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
        begins = bool(ends) and ends[-1] == len(tokens)
