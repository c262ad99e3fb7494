"""Tokenization of preference data: pairs of a chosen and a rejected answer, and single answers with a judgment.

Takes rows of text and a tokenizer; gives rows of token ids, which `PreferenceCollator` pads. Prompt and answers are
tokenized separately, so the border between them is exact, and each answer ends with the end-of-text token. A row with a
missing text, an empty answer, two equal answers, an unknown judgment or a margin that is not a number raises an error
with its number. The numbers of truncated and of dropped rows (nothing of an answer, or no difference, left) are logged.

For KTO, each row also gets the answer of the next row, as `kl_ids`: an answer that does not belong to the prompt.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.chat_rows import Conversation
from forgather.ml.data.chat_tokens import template_facts
from forgather.ml.data.conversations import CONVERSATION, SOURCE
from forgather.ml.data.data_errors import DataError, row_place
from forgather.ml.data.packing import check_inputs, encode_rows, encode_texts, read_rows, rows_writer
from forgather.ml.data.preference_chats import pair_tokens
from forgather.ml.data.preference_collator import MARGIN
from forgather.ml.data.preference_rows import ANSWERS
from forgather.ml.data.row_epoch import is_block
from forgather.ml.data.row_stream import Row, RowStream, groups, refuse_stored, warn_of_first
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

_STATS = "stats.json"
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
_FEEDBACK = ("prompt_ids", "completion_ids", "label")
_NUMBERS = {"label": pa.int32(), MARGIN: pa.float64()}
_CHAT_ANSWERS = {"chosen_column": "chosen", "rejected_column": "rejected"}
_STREAMED_ROWS = 32  # that are tokenized at a time
_JUDGMENTS = (True, False)


def tokenize_preferences(
    dataset: Dataset | DatasetDict | RowStream,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    *,
    prompt_column: str = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict | RowStream:
    """Returns a data set of pairs: a prompt, a better and a worse answer to it, as token ids.

    The answers of texts end with the end-of-text token. Conversations of `preference_pairs` are rendered by the chat
    template of the tokenizer, and their answers end with the token that ends an answer.

    Args:
        dataset: the rows, of text or from `preference_pairs`. A column `margin` with numbers, which `RewardLoss` uses,
            is kept. The splits of a `DatasetDict` are tokenized separately, and streamed rows when they are read.
        tokenizer: a tokenizer with an end-of-text token; for conversations, with a chat template that marks the
            answers.
        max_length: the maximum length of a prompt with an answer in tokens. Longer answers are truncated at the end.
        prompt_column: the name of the column with the prompt.
        chosen_column: the name of the column with the better answer.
        rejected_column: the name of the column with the worse answer.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Returns:
        Rows with the columns `prompt_ids`, `chosen_ids` and `rejected_ids`, and `margin` if the data set has it.

    Raises:
        DataError: FG831, FG837 or FG839 if columns, tokenizer or length do not fit; FG910 if a row has no text, FG911
            if an answer is empty, FG912 if both answers are equal, FG913 if a margin is not a number, FG836 if no pair
            is left; for conversations, FG893 to FG895, FG897, FG898 or FG942 if the chat template cannot render them,
            with the file and line of the row; FG982 if an argument is not for streamed rows.
    """
    refuse_wrong_values("data:tokenize_preferences", locals())
    named = {"prompt_column": prompt_column, "chosen_column": chosen_column, "rejected_column": rejected_column}
    return _tokenized(_pairs, dataset, tokenizer, max_length, named, num_proc, cache_dir)


def tokenize_feedback(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    *,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    label_column: str = "label",
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns a data set of single answers with a judgment (good or bad), as token ids, for KTO.

    Args:
        dataset: the rows of text. The splits of a `DatasetDict` are tokenized separately.
        tokenizer: a tokenizer with an end-of-text token.
        max_length: the maximum length of a prompt with an answer in tokens. Longer answers are truncated at the end.
        prompt_column: the name of the column with the prompt.
        completion_column: the name of the column with the answer.
        label_column: the name of the column with the judgment: true or 1 for a good answer, false or 0 for a bad one.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Returns:
        Rows with the columns `prompt_ids`, `completion_ids`, `label` (1 or 0) and `kl_ids` (the answer of the next row;
        of the first row, for the last one; truncated like the row's own answer).

    Raises:
        DataError: FG831, FG837 or FG839 if columns, tokenizer or length do not fit; FG910 if a row has no text, FG911
            if an answer is empty, FG913 if a judgment is neither true nor false, FG836 if no row is left.
    """
    refuse_wrong_values("data:tokenize_feedback", locals())
    named = {"prompt_column": prompt_column, "completion_column": completion_column, "label_column": label_column}
    rows = _tokenized(_judged, dataset, tokenizer, max_length, named, num_proc, cache_dir)
    return _with_next_answers(rows, max_length)


def _tokenized(
    kind: Callable[..., Mapping[str, Any]],
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    named: Mapping[str, str],
    num_proc: int | None,
    cache_dir: str | os.PathLike[str] | None,
) -> Any:
    if isinstance(dataset, DatasetDict):
        parts = {
            name: _tokenized(kind, part, tokenizer, max_length, named, num_proc, cache_dir)
            for name, part in dataset.items()
        }
        return DatasetDict(parts)
    refuse_stored(dataset, num_proc=num_proc, cache_dir=cache_dir)
    is_chat = kind is _pairs and CONVERSATION in dataset.column_names
    # The prompt of a conversation is in another column, and its answers are where `preference_pairs` puts them.
    check_inputs(dataset, tokenizer, _CHAT_ANSWERS if is_chat else named)
    form = kind(*named.values())
    encode = partial(_encode_chats if is_chat else _encode, tokenizer, form["texts"], form["label"])
    if isinstance(dataset, RowStream):
        # The rows were checked by `preference_pairs`, which alone makes a stream with these columns.
        return dataset.prepared(partial(_streamed, encode, form["names"], max_length), form["names"])
    # Everything that decides the content is part of the key; `num_proc` is not.
    facts = {"rows": dataset._fingerprint, "tokenizer": tokenizer_digest(tokenizer), "max_length": max_length}
    # A column of the name `margin` is not read for judged answers.
    margins = MARGIN if form["label"] is None and MARGIN in dataset.column_names else None
    if is_chat:
        named = template_facts(tokenizer)
    key = content_key(format=4, kind=kind.__name__, margins=margins, **facts, **named)

    def build(folder: Path) -> None:
        """Writes the tokens of all rows into a folder of the cache."""
        if not is_chat:
            _check_rows(dataset, form["texts"], form["check"])
        batches = encode_rows(dataset, encode, num_proc)
        if margins is not None:
            batches = _with_margins(batches, iter(dataset[margins]))
        names = (*form["names"], *([MARGIN] if margins else ()))
        stats = _write(folder, batches, names, max_length)
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("preferences", key, build, cache_dir)
    _report(json.loads((folder / _STATS).read_text(encoding="utf-8")), max_length)
    return read_rows(folder, key)


def _report(stats: Mapping[str, int], max_length: int) -> None:
    report = logger.warning if stats["num_dropped"] or stats["num_cut"] else logger.info
    report(
        "%s of preferences; %d cut to %d tokens, %d left out (the prompt has no tokens or fills the row, the answers "
        "are equal after the cut, or a message has a control token)",
        plural(stats["num_rows"], "row"),
        stats["num_cut"],
        max_length,
        stats["num_dropped"],
    )


def _pairs(prompt: str, chosen: str, rejected: str) -> Mapping[str, Any]:
    def check(number: int, row: Mapping[str, Any]) -> None:
        """Raises an error if a row is no pair."""
        _refuse_empty(number, row, (chosen, rejected))
        if row[chosen] == row[rejected]:
            raise DataError(
                f"{row_place(number)} has equal texts in {chosen!r} and {rejected!r}: {_shown(row[chosen])}",
                code="FG912",
                hint="remove the row: a pair of equal answers has no preference",
                found=number,
            )
        margin = row.get(MARGIN, 0)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise DataError(
                f"{row_place(number)} has {_shown(margin)} in {MARGIN!r}, which is not a number",
                code="FG913",
                hint="give each row a number, 0 for none, or rename the column",
                found=number,
            )

    return {"texts": (prompt, chosen, rejected), "label": None, "check": check, "names": _PAIR}


def _judged(prompt: str, completion: str, label: str) -> Mapping[str, Any]:
    def check(number: int, row: Mapping[str, Any]) -> None:
        """Raises an error if a row is no judged answer."""
        _refuse_empty(number, row, (completion,))
        # `1 in (True, False)` holds, "true" and 0.5 are refused.
        if row[label] not in _JUDGMENTS:
            raise DataError(
                f"{row_place(number)} has {_shown(row[label])} in {label!r}, which is not a judgment",
                code="FG913",
                hint="true (or 1) for a good answer, false (or 0) for a bad one",
                found=number,
            )

    return {"texts": (prompt, completion), "label": label, "check": check, "names": _FEEDBACK}


def _check_rows(dataset: Dataset, texts: Sequence[str], check: Callable[[int, Mapping[str, Any]], None]) -> None:
    """Raises an error for the first row that is no example. Rows are numbered from 0, as they are indexed."""
    number = 0
    for batch in dataset.iter(batch_size=256):
        for values in zip(*batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            for name in texts:
                if not isinstance(row[name], str):
                    raise _no_text(number, name, row[name])
            check(number, row)
            number += 1


def _no_text(number: int, name: str, value: Any) -> DataError:
    found = "has no text" if value is None else f"has a {type(value).__name__}, not text,"
    return DataError(
        f"{row_place(number)} {found} in {name!r}",
        code="FG910",
        hint="write prompt and answers as text"
        if value is None
        else "read messages of a chat with 'datasets/preferences.yaml' (forgather.ml.data:preference_pairs)",
        found=number,
    )


def _refuse_empty(number: int, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    for name in columns:
        if not row[name].strip():
            raise DataError(
                f"{row_place(number)} has an empty answer in {name!r}",
                code="FG911",
                hint="remove the row, or give the answer: the loss compares the probabilities of answers",
                found=number,
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], label: str | None, batch: dict[str, list[Any]]
) -> dict[str, list[list[list[int]]]]:
    parts = [encode_texts(tokenizer, column, batch)["input_ids"] for column in texts]
    end = [tokenizer.eos_token_id]
    # An answer of blanks may have no tokens, and its row is left out. A text may end with the token already.
    parts[1:] = [[ids if ids[-1:] == end or not ids else [*ids, *end] for ids in answers] for answers in parts[1:]]
    if label is not None:
        parts.append([[int(value)] for value in batch[label]])
    # `encode_rows` expects one list per row, so the texts of a row travel together.
    return {"input_ids": [list(ids) for ids in zip(*parts, strict=True)]}


def _with_margins(batches: Any, margins: Iterator[float]) -> Iterator[list[Any]]:
    """Yields the batches with the margin of each row as its last part, in a list as the ids are."""
    for batch in batches:
        yield [[*parts, [next(margins)]] for parts in batch]


def _encode_chats(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], label: None, batch: dict[str, list[Any]]
) -> dict[str, list[list[list[int]]]]:
    rows = []
    columns = [batch[name] for name in (CONVERSATION, *ANSWERS, SOURCE)]
    for stored, *answers, source in zip(*columns, strict=True):
        try:
            found = pair_tokens(tokenizer, Conversation.from_json(stored), [json.loads(answer) for answer in answers])
        except DataError as error:
            error.message = f"{source}: {error.message}"
            error.args = (error.message,)
            raise
        rows.append(found or [[] for _ in (CONVERSATION, *answers)])
    return {"input_ids": rows}


def _write(folder: Path, batches: Any, names: Sequence[str], max_length: int) -> dict[str, int]:
    kinds = {name: _NUMBERS.get(name, pa.list_(pa.int32())) for name in names}
    schema = pa.schema(kinds)
    stats = _no_rows()
    with rows_writer(folder, schema) as writer:
        for batch in batches:
            kept = list(_rows(batch, names, max_length, stats))
            columns = {name: [row[place] for row in kept] for place, name in enumerate(names)}
            writer.write_batch(pa.record_batch(columns, schema=schema))
            stats["num_rows"] += len(kept)
    _refuse_nothing(stats)
    return stats


def _streamed(
    encode: Callable[[dict[str, list[Any]]], dict[str, list[Any]]],
    names: Sequence[str],
    max_length: int,
    rows: Iterator[Row],
) -> Iterator[Row]:
    """Yields the tokens of streamed rows, and logs at the end how many were cut or dropped."""
    stats = _no_rows()
    try:
        for group in groups(rows, _STREAMED_ROWS):
            columns = {name: [row[name] for row in group] for name in group[0]}
            for ids, source in zip(encode(columns)["input_ids"], columns[SOURCE], strict=True):
                for kept in _rows([ids], names, max_length, stats):
                    stats["num_rows"] += 1
                    yield dict(zip(names, kept, strict=True))
                    break
                else:
                    if stats["num_dropped"] == 1:
                        what = f"{source} is left out: it has no prompt, or no difference within max_length"
                        warn_of_first(logger, what, kind="pairs without a difference")
        # A worker process may have only rows that are dropped while the others have usable ones.
        if get_worker_info() is None and not is_block():
            _refuse_nothing(stats)
    finally:
        # A run usually ends within an epoch; then, too, it says what was left out.
        if stats["num_rows"] and not is_block():
            _report(stats, max_length)


def _no_rows() -> dict[str, int]:
    return {"num_rows": 0, "num_cut": 0, "num_dropped": 0}


def _refuse_nothing(stats: Mapping[str, int]) -> None:
    if not stats["num_rows"]:
        raise DataError(
            "no row has an answer to learn from", code="FG836", hint="a larger max_length, or other columns"
        )


def _rows(
    batch: Sequence[Any], names: Sequence[str], max_length: int, stats: dict[str, int]
) -> Iterator[tuple[Any, ...]]:
    has_number = names[-1] in _NUMBERS
    for prompt, *whole in batch:
        number = (whole.pop()[0],) if has_number else ()
        answers = [ids[: max(0, max_length - len(prompt))] for ids in whole]
        # Equal beginnings of two answers have no preference.
        is_same = len(answers) > 1 and answers[0] == answers[1]
        # Without a prompt, nothing predicts the first token of an answer.
        if is_same or not prompt or not all(answers):
            stats["num_dropped"] += 1
            continue
        stats["num_cut"] += answers != whole
        yield (prompt, *answers, *number)


def _with_next_answers(rows: Any, max_length: int) -> Any:
    """Returns the rows with the column `kl_ids`, which holds the answer of the next row, and of the first for the last.

    The column refers to the memory of the answers, so it costs none, unless an answer is too long for the prompt of its
    new row and must be truncated.
    """
    if isinstance(rows, DatasetDict):
        return DatasetDict({name: _with_next_answers(part, max_length) for name, part in rows.items()})
    table = rows.data.table
    answers = table["completion_ids"]
    turned = pa.chunked_array([*answers.slice(1).chunks, *answers.slice(0, 1).chunks], type=answers.type)
    # The room that each prompt leaves is 1 or more: rows whose prompt fills them were dropped.
    room_N = max_length - pc.list_value_length(table["prompt_ids"]).to_numpy()
    if np.any(pc.list_value_length(turned).to_numpy() > room_N):
        cut = (ids[:room] for ids, room in zip(turned.to_pylist(), room_N.tolist(), strict=True))
        turned = pa.chunked_array([pa.array(list(cut), type=answers.type)])
    table = table.append_column("kl_ids", turned)
    return Dataset(table, fingerprint=content_key(format=2, rows=rows._fingerprint, column="kl_ids"))
