"""Prompts and expected answers of tokenized rows, for evaluations that generate.

Takes the rows of an evaluation set as `tokenize_chats` and `tokenize_examples` make them; gives, for each row, the
tokens before the last answer and the tokens of that answer. The labels say where the answer is, so a prompt is what the
model saw before it in training, rendered by the same chat template. Rows without a prompt or without a whole answer are
left out and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import compress
from typing import Any, NamedTuple

from forgather.ml.data.data_errors import DataError
from forgather.ml.number_format import plural

_log = logging.getLogger(__name__)

_IGNORED = -100
_HINT = "answers are generated for rows with input_ids and labels, as datasets/chat.yaml and datasets/instructions.yaml"


class AnswerRow(NamedTuple):
    """A row of an evaluation set.

    Args:
        number: the number of the row in the set, counted from 0.
        prompt: the token ids before the last answer.
        expected: the token ids of that answer, with the token at which generation stops; empty for a row without
            labels.
    """

    number: int
    prompt: list[int]
    expected: list[int]


def answer_rows(dataset: Any, stops: Collection[int], *, limit: int | None = None) -> list[AnswerRow]:
    """Returns the prompts and expected answers of the first rows of a data set.

    The last answer of a row is its last range of labels that are not -100. A row without labels is a prompt.

    Args:
        dataset: a data set with a length and rows by number.
        stops: the ids of the tokens at which generation stops. An answer that ends with another one was cut.
        limit: the number of rows to read, or None for all.

    Raises:
        DataError: FG964 if the data set is a stream, if its rows are not prompts with answers, or if none is left.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise _unusable("the evaluation set is a stream, and its rows have no numbers", "give a data set with a length")
    count = len(dataset) if limit is None else min(limit, len(dataset))
    left_out = {"without a prompt before the answer": 0, "whose answer is not whole": 0}
    rows = []
    for number in range(count):
        found = _answer_row(number, dataset[number], frozenset(stops))
        if isinstance(found, str):
            left_out[found] += 1
        else:
            rows.append(found)
    reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.items() if number)
    if not rows:
        raise _unusable(
            f"no row of the evaluation set has a prompt and a whole answer: {reasons or 'there are no rows'}",
            "labels of -100 tell the prompt from the answer (train_on: assistant), and the last label is the token at "
            "which generation stops",
        )
    if reasons:
        _log.warning("answers are generated for %s; left out: %s", plural(len(rows), "row"), reasons)
    return rows


def _answer_row(number: int, row: Any, stops: frozenset[int]) -> AnswerRow | str:
    """Returns the prompt and the answer of a row, or the reason why it is left out."""
    ids = row.get("input_ids") if isinstance(row, Mapping) else None
    if ids is None:
        raise _unusable("the rows of the evaluation set have no input_ids", _HINT)
    ids = [int(id_) for id_ in ids]
    # A position that is not the number of its token begins another document.
    if any(int(position) != place for place, position in enumerate(row.get("position_ids", ()))):
        raise _unusable("the rows of the evaluation set hold several documents", "give rows that are not packed")
    # What attention does not see, such as padding, belongs to no prompt.
    mask = row.get("attention_mask")
    seen = [1] * len(ids) if mask is None else [int(one) for one in mask]
    if row.get("labels") is None:
        return AnswerRow(number, list(compress(ids, seen)), [])
    labels = [int(label) for label in row["labels"]] if hasattr(row["labels"], "__len__") else []
    if len(labels) != len(ids):
        raise _unusable("the rows of the evaluation set do not have one label for each token", _HINT)
    ids, labels = list(compress(ids, seen)), list(compress(labels, seen))
    end = next((place for place in range(len(ids), 0, -1) if labels[place - 1] != _IGNORED), 0)
    begin = next((place for place in range(end, 0, -1) if labels[place - 1] == _IGNORED), 0)
    if not begin:
        return "without a prompt before the answer"
    return AnswerRow(number, ids[:begin], ids[begin:end]) if ids[end - 1] in stops else "whose answer is not whole"


def _unusable(message: str, hint: str) -> DataError:
    error: DataError = DataError(message, code="FG964", hint=hint)
    return error.about("eval_dataset")
