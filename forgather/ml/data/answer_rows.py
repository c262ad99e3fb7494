"""Prompts and expected answers of tokenized rows, for evaluations that generate.

Takes the rows of an evaluation set as `tokenize_chats` and `tokenize_examples` make them; gives, for each row, the
tokens before the last answer and the tokens of that answer. The labels say where the answer is, so a prompt is what the
model saw before it in training, rendered by the same chat template. Rows without a prompt or without a whole answer are
left out and counted.

For a model with an encoder, the rows are those of `tokenize_seq2seq`: all tokens are the prompt, and all labels the
answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from forgather.ml.data.data_errors import DataError
from forgather.ml.number_format import plural

_log = logging.getLogger(__name__)

_IGNORED = -100
_HINT_OF_SOURCES = "answers are generated for rows with input_ids and labels, as datasets/source_target.yaml"
_NOT_GENERATED_FROM = ("decoder_input_ids", "inputs_embeds", "global_attention_mask")
"""Columns that training gives to a model with an encoder, and generation does not."""
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
    read = partial(_answer_row, stops=frozenset(stops))
    return _read_rows(
        dataset,
        limit,
        read,
        "labels of -100 tell the prompt from the answer (train_on: assistant), and the last label is the token at "
        "which generation stops",
    )


def source_rows(dataset: Any, *, limit: int | None = None) -> list[AnswerRow]:
    """Returns the sources and targets of the first rows of a data set, for a model with an encoder.

    A target consists of the labels that are not -100. A row without labels is a source alone.

    Args:
        dataset: a data set with a length and rows by number.
        limit: the number of rows to read, or None for all.

    Raises:
        DataError: FG964 if the data set is a stream, if its rows are not sources with targets, or if none is left.
    """
    return _read_rows(dataset, limit, _source_row, _HINT_OF_SOURCES)


def _read_rows(
    dataset: Any, limit: int | None, read: Callable[[int, Any], AnswerRow | str], hint: str
) -> list[AnswerRow]:
    """Returns the rows that `read` makes; a text that it returns is the reason why a row is left out."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise _unusable("the evaluation set is a stream, and its rows have no numbers", "give a data set with a length")
    count = len(dataset) if limit is None else min(limit, len(dataset))
    found = [read(number, dataset[number]) for number in range(count)]
    rows = [row for row in found if not isinstance(row, str)]
    left_out = Counter(row for row in found if isinstance(row, str))
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(left_out.items(), reverse=True))
    if not rows:
        raise _unusable(
            f"no row of the evaluation set has a prompt and a whole answer: {reasons or 'there are no rows'}", hint
        )
    if reasons:
        _log.warning("answers are generated for %s; left out: %s", plural(len(rows), "row"), reasons)
    return rows


def _source_row(number: int, row: Any) -> AnswerRow | str:
    """Returns the source and the target of a row, or the reason why it is left out."""
    ids = row.get("input_ids") if isinstance(row, Mapping) else None
    if ids is None:
        raise _unusable("the rows of the evaluation set have no input_ids", _HINT_OF_SOURCES)
    for name in _NOT_GENERATED_FROM:
        if row.get(name) is not None:
            raise _unusable(f"the rows of the evaluation set have {name!r}, which no generation reads", "remove it")
    mask = row.get("attention_mask")
    source = list(map(int, ids if mask is None else compress(ids, map(int, mask))))
    if not source:
        return "without a source"
    if row.get("labels") is None:
        return AnswerRow(number, source, [])
    labels = row["labels"] if hasattr(row["labels"], "__len__") else []
    target = [int(label) for label in labels if int(label) != _IGNORED]
    return AnswerRow(number, source, target) if target else "without a target"


def _answer_row(number: int, row: Any, *, stops: frozenset[int]) -> AnswerRow | str:
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
