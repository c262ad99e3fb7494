"""Tokenization of preference data: pairs of a chosen and a rejected answer, and single answers with a judgment.

Takes rows of text and a tokenizer; gives rows of token ids, which `PreferenceCollator` pads. Prompt and answers are
tokenized separately, so the border between them is exact, and each answer ends with the end-of-text token. A row with a
missing text, an empty answer, two equal answers or an unknown judgment raises an error with its number. The numbers of
truncated and of dropped rows (nothing of an answer, or no difference, left) are logged.

For KTO, each row also gets the answer of the next row, as `kl_ids`: an answer that does not belong to the prompt.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.packing import check_inputs, encode_rows, encode_texts, read_rows, rows_writer
from forgather.ml.data.tokenizer import tokenizer_digest

logger = logging.getLogger(__name__)

_STATS = "stats.json"
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
_FEEDBACK = ("prompt_ids", "completion_ids", "label")
_JUDGMENTS = (True, False)


def tokenize_preferences(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    *,
    prompt_column: str = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns a data set of pairs: a prompt, a better and a worse answer to it, as token ids.

    Args:
        dataset: the rows of text. The splits of a `DatasetDict` are tokenized separately.
        tokenizer: a tokenizer with an end-of-text token.
        max_length: the maximum length of a prompt with an answer in tokens. Longer answers are truncated at the end.
        prompt_column: the name of the column with the prompt.
        chosen_column: the name of the column with the better answer.
        rejected_column: the name of the column with the worse answer.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Returns:
        Rows with the columns `prompt_ids`, `chosen_ids` and `rejected_ids`.

    Raises:
        DataError: FG831, FG837 or FG839 if columns, tokenizer or length do not fit; FG910 if a row has no text, FG911
            if an answer is empty, FG912 if both answers are equal, FG836 if no pair is left.
    """
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
        of the first row, for the last one).

    Raises:
        DataError: FG831, FG837 or FG839 if columns, tokenizer or length do not fit; FG910 if a row has no text, FG911
            if an answer is empty, FG913 if a judgment is neither true nor false, FG836 if no row is left.
    """
    named = {"prompt_column": prompt_column, "completion_column": completion_column, "label_column": label_column}
    return _with_next_answers(_tokenized(_judged, dataset, tokenizer, max_length, named, num_proc, cache_dir))


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
    check_inputs(dataset, tokenizer, named, max_length=max_length)
    # Everything that decides the content is part of the key; `num_proc` is not.
    facts = {"rows": dataset._fingerprint, "tokenizer": tokenizer_digest(tokenizer), "max_length": max_length}
    key = content_key(format=1, kind=kind.__name__, **facts, **named)
    form = kind(*named.values())

    def build(folder: Path) -> None:
        _check_rows(dataset, form["texts"], form["check"])
        batches = encode_rows(dataset, partial(_encode, tokenizer, form["texts"], form["label"]), num_proc)
        stats = _write(folder, batches, form["names"], max_length, tokenizer.eos_token_id)
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("preferences", key, build, cache_dir)
    stats = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    report = logger.warning if stats["num_dropped"] or stats["num_cut"] else logger.info
    report(
        "%(num_rows)d rows of preferences; %(num_cut)d cut to %(max_length)d tokens, %(num_dropped)d left out (the "
        "prompt fills the row, or the answers are equal after the cut)",
        stats,
    )
    return read_rows(folder, key)


def _pairs(prompt: str, chosen: str, rejected: str) -> Mapping[str, Any]:
    def check(number: int, row: Mapping[str, Any]) -> None:
        _refuse_empty(number, row, (chosen, rejected))
        if row[chosen] == row[rejected]:
            raise DataError(
                f"row {number} of the data set has equal texts in {chosen!r} and {rejected!r}: {_shown(row[chosen])}",
                code="FG912",
                hint="remove the row: a pair of equal answers has no preference",
                found=number,
            )

    return {"texts": (prompt, chosen, rejected), "label": None, "check": check, "names": _PAIR}


def _judged(prompt: str, completion: str, label: str) -> Mapping[str, Any]:
    def check(number: int, row: Mapping[str, Any]) -> None:
        _refuse_empty(number, row, (completion,))
        # `1 in (True, False)` holds, "true" and 0.5 are refused.
        if row[label] not in _JUDGMENTS:
            raise DataError(
                f"row {number} of the data set has {_shown(row[label])} in {label!r}, which is not a judgment",
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
        f"row {number} of the data set {found} in {name!r}",
        code="FG910",
        hint="write prompt and answers as text"
        if value is None
        else "write prompt and answers as text, for example with tokenizer.apply_chat_template(..., tokenize=False)",
        found=number,
    )


def _refuse_empty(number: int, row: Mapping[str, Any], columns: Sequence[str]) -> None:
    for name in columns:
        if not row[name].strip():
            raise DataError(
                f"row {number} of the data set has an empty answer in {name!r}",
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
    if label is not None:
        parts.append([[int(value)] for value in batch[label]])
    # `encode_rows` expects one list per row, so the texts of a row travel together.
    return {"input_ids": [list(ids) for ids in zip(*parts, strict=True)]}


def _write(folder: Path, batches: Any, names: Sequence[str], max_length: int, eos_token_id: int) -> dict[str, int]:
    kinds = {name: pa.int32() if name == "label" else pa.list_(pa.int32()) for name in names}
    schema = pa.schema(kinds)
    stats = {"num_rows": 0, "num_cut": 0, "num_dropped": 0, "max_length": max_length}
    with rows_writer(folder, schema) as writer:
        for batch in batches:
            kept = list(_rows(batch, names, max_length, eos_token_id, stats))
            columns = {name: [row[place] for row in kept] for place, name in enumerate(names)}
            writer.write_batch(pa.record_batch(columns, schema=schema))
            stats["num_rows"] += len(kept)
    if not stats["num_rows"]:
        raise DataError(
            "no row has an answer to learn from", code="FG836", hint="a larger max_length, or other columns"
        )
    return stats


def _rows(
    batch: Sequence[Any], names: Sequence[str], max_length: int, eos_token_id: int, stats: dict[str, int]
) -> Iterator[tuple[Any, ...]]:
    judged = "label" in names
    for prompt, *others in batch:
        label = (others.pop()[0],) if judged else ()
        whole = [[*ids, eos_token_id] for ids in others]
        answers = [ids[: max(0, max_length - len(prompt))] for ids in whole]
        # An answer of blanks may have no tokens; equal beginnings of two answers have no preference.
        is_same = len(answers) > 1 and answers[0] == answers[1]
        if is_same or not all(answers) or not all(others):
            stats["num_dropped"] += 1
            continue
        stats["num_cut"] += answers != whole
        yield (prompt, *answers, *label)


def _with_next_answers(rows: Any) -> Any:
    """Returns the rows with the column `kl_ids`, which holds the answer of the next row, and of the first for the last.

    The column refers to the memory of the answers, so it costs none.
    """
    if isinstance(rows, DatasetDict):
        return DatasetDict({name: _with_next_answers(part) for name, part in rows.items()})
    table = rows.data.table
    answers = table["completion_ids"]
    turned = [*answers.slice(1).chunks, *answers.slice(0, 1).chunks]
    table = table.append_column("kl_ids", pa.chunked_array(turned, type=answers.type))
    return Dataset(table, fingerprint=content_key(rows=rows._fingerprint, column="kl_ids"))
