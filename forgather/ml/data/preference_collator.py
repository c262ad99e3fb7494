"""`PreferenceCollator`: batches of preference data, with one entry per row for both answers.

Takes the rows of `tokenize_preferences` or `tokenize_feedback`; gives tensors whose first dimension is the number of
rows. A row is a pair, so batches are split among micro-batches, ranks and pipeline stages by whole pairs.

Shapes:
    B rows, 2 answers of each row, T tokens of the longest answer with its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.data_errors import DataError

COMPLETION_MASK = "completion_mask"
"""The entry of a batch that is 1 at the tokens of answers."""
REFERENCE = "reference_logps"
"""The column, and the entry of a batch, with the log-probabilities of both answers under the reference model."""
MARGIN = "margin"
JUDGED = "judged"
"""The entry of a batch of judged answers that says so: their second answers are no worse ones."""

_ANSWERS = (("chosen_ids", "rejected_ids"), ("completion_ids", "kl_ids"))


class PreferenceCollator:
    """A collator that pads the two answers of each row, each after its prompt, to one length.

    The rows of `tokenize_preferences` have a chosen and a rejected answer. Those of `tokenize_feedback` have an answer,
    and the answer of another row, from which KTO estimates how far the model has moved.

    Args:
        tokenizer: the tokenizer whose padding id is used. Without a tokenizer or padding id, 0 is used.
        pad_to_multiple_of: the number to a multiple of which the length is rounded up, or None for no rounding.

    Raises:
        DataError: FG839 if `pad_to_multiple_of` is below 1.

    Example:
        >>> batch = PreferenceCollator()([{"prompt_ids": [5], "chosen_ids": [6, 2], "rejected_ids": [7, 8, 2]}])
        >>> batch["input_ids"].tolist(), batch["completion_mask"].tolist(), batch["labels"].tolist()
        ([[[5, 6, 2, 0], [5, 7, 8, 2]]], [[[0, 1, 1, 0], [0, 1, 1, 1]]], [0])
    """

    columns = frozenset({"prompt_ids", "label", REFERENCE, MARGIN, *(name for pair in _ANSWERS for name in pair)})
    """The columns that the collator reads, which are kept although they are not arguments of the model."""

    def __init__(self, tokenizer: Any = None, *, pad_to_multiple_of: int | None = None) -> None:
        refuse_wrong_values("data:PreferenceCollator", locals())
        self.tokenizer = tokenizer
        self.pad_to_multiple_of = pad_to_multiple_of or 1
        self._pad_id = int(getattr(tokenizer, "pad_token_id", None) or 0)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns the batch of `rows`, which all have the same columns.

        The labels are the place of the better answer of a pair, which is 0, or the judgment of a single answer, 1 or 0.

        Shapes:
            input_ids, attention_mask, completion_mask: (B, 2, T). reference_logps: (B, 2).
            labels, margin, judged: (B,).

        Raises:
            DataError: FG914 if the rows are neither pairs nor judged answers.
        """
        first = rows[0]
        names = next((pair for pair in _ANSWERS if {"prompt_ids", *pair} <= {*first}), None)
        if names is None or (names[0] == "completion_ids" and "label" not in first):
            raise DataError(
                f"the rows have the columns {', '.join(map(repr, first))}, which are not those of preferences",
                code="FG914",
                hint="tokenize pairs with forgather.ml.data:tokenize_preferences, and judged answers with "
                "forgather.ml.data:tokenize_feedback",
            )
        prompts = [_ids(row["prompt_ids"]) for row in rows]
        answers = [[_ids(row[name]) for name in names] for row in rows]
        longest = max(len(prompt) + len(ids) for prompt, pair in zip(prompts, answers, strict=True) for ids in pair)
        length = math.ceil(longest / self.pad_to_multiple_of) * self.pad_to_multiple_of
        ids_BAT = torch.full((len(rows), 2, length), self._pad_id)
        attention_BAT = torch.zeros_like(ids_BAT)
        completion_BAT = torch.zeros_like(ids_BAT)
        for number, (prompt, pair) in enumerate(zip(prompts, answers, strict=True)):
            for place, ids in enumerate(pair):
                end = len(prompt) + len(ids)
                ids_BAT[number, place, :end] = torch.cat([prompt, ids])
                attention_BAT[number, place, :end] = 1
                completion_BAT[number, place, len(prompt) : end] = 1
        is_judged = names[0] == "completion_ids"
        labels = [int(row["label"]) for row in rows] if is_judged else [0] * len(rows)
        batch = {"input_ids": ids_BAT, "attention_mask": attention_BAT, COMPLETION_MASK: completion_BAT}
        batch["labels"] = torch.tensor(labels)
        if is_judged:
            batch[JUDGED] = torch.ones(len(rows), dtype=torch.bool)
        for name in (REFERENCE, MARGIN):
            if name in first:
                batch[name] = torch.stack([torch.as_tensor(row[name]) for row in rows])
        return batch


def _ids(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.long)
