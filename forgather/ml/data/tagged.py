"""Rows of words with a tag for each word, as for named entities or parts of speech.

`tagged_rows` reads JSON lines in which a row has a list of words and a list of tags, and gives a data set in which each
tag is the number of a class. `tokenize_tagged` makes the rows that a model for token classification takes: the first
token of a word has the tag of the word, and every other token has the label -100, which is not counted.

Shapes:
    W words of a row, T tokens of a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, List, Value
from transformers import PreTrainedTokenizerBase

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import missing_column
from forgather.ml.data.file_rows import (
    FileRow,
    check_labels,
    label_of,
    numbered_labels,
    rows_with_columns,
    stored_rows,
    text_of,
    unusable,
)
from forgather.ml.data.packing import encode_rows, read_rows, rows_writer
from forgather.ml.data.sources import Paths
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

_IGNORED = -100
_STATS = "stats.json"


def tagged_rows(
    paths: Paths,
    *,
    tokens_column: str | None = None,
    tags_column: str | None = None,
    labels: Sequence[str] | None = None,
) -> Dataset:
    """Returns the rows of JSON lines, with their tags as numbers.

    Args:
        paths: a file, a folder (whose `.jsonl` and `.json` files are read), a glob, or a list of these.
        tokens_column: the name of the column with the list of words; None for a usual name.
        tags_column: the name of the column with the list of tags, one for each word; None for a usual name.
        labels: the names of the tags in the order of their numbers. None for all tags that occur, sorted. With names, a
            tag in the files can be a name or a number.

    Returns:
        A data set with the columns `tokens`, `tags` and `text`, the words joined by blanks. A tag is a `ClassLabel`
        with all names.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line cannot be read.
        DataError: FG831 if a column is missing, FG975 if several could be meant; FG832 if there are no rows; FG876 if a
            tag is not one of `labels`;
            FG877 if a row does not have one tag for each word; FG878 if the arguments cannot be used.
    """
    check_labels(labels)
    rows = rows_with_columns(paths, {"tokens_column": tokens_column, "tags_column": tags_column})
    words = [_words(row, row.values["tokens_column"]) for row in rows]
    given = [_tags(row, row.values["tags_column"], len(own)) for row, own in zip(rows, words, strict=True)]
    names, numbers = numbered_labels(rows, given, labels)
    columns: dict[str, Sequence[Any]] = {"tokens": words, "tags": numbers, "text": [" ".join(own) for own in words]}
    tags = List(ClassLabel(names=names))
    return stored_rows("tagged", columns, {"tokens": List(Value("string")), "tags": tags, "text": Value("string")})


def tokenize_tagged(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 256,
    *,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns the token ids of each row, with the special tokens of the tokenizer, and a label for each token.

    The first token of a word has the number of its tag as label; all other tokens have -100. The numbers of rows that
    were cut, and of words without a token, whose tags are lost, are logged.

    Args:
        dataset: the rows that `tagged_rows` returned. The splits of a `DatasetDict` are tokenized separately.
        tokenizer: a fast tokenizer with a padding token.
        max_length: the maximum length in tokens. Longer rows are cut.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Shapes:
        `input_ids` and `labels`: (T,).

    Raises:
        DataError: FG831 if a column is missing; FG878 if the tokenizer has no padding token or does not say which
            tokens a word has, or if `max_length` is below 1.
    """
    refuse_wrong_values("data:tokenize_tagged", locals())
    if isinstance(dataset, DatasetDict):
        options: dict[str, Any] = {"num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict(
            {name: tokenize_tagged(part, tokenizer, max_length, **options) for name, part in dataset.items()}
        )
    _check_arguments(dataset, tokenizer)
    key = content_key(
        format=1,
        rows=dataset._fingerprint,
        tokenizer=tokenizer_digest(tokenizer),
        max_length=max_length,
    )

    def build(folder: Path) -> None:
        """Writes the token ids and labels of all rows into a folder of the cache, and counts what was cut."""
        stats = {"rows": len(dataset), "cut": 0, "lost": 0}
        schema = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})
        with rows_writer(folder, schema) as writer:
            for batch in encode_rows(dataset, partial(_encode, tokenizer, max_length), num_proc):
                stats["cut"] += sum(is_cut for _, _, (is_cut, _) in batch)
                stats["lost"] += sum(lost for _, _, (_, lost) in batch)
                columns = {"input_ids": [ids for ids, _, _ in batch], "labels": [labels for _, labels, _ in batch]}
                writer.write_batch(pa.record_batch(columns, schema=schema))
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("tagged", key, build, cache_dir)
    stats = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    report = logger.warning if stats["cut"] or stats["lost"] else logger.info
    lost = f"; {plural(stats['lost'], 'word')} without a token, whose tags are not used" if stats["lost"] else ""
    report("%s; %d cut to %d tokens%s", plural(stats["rows"], "row"), stats["cut"], max_length, lost)
    return read_rows(folder, key)


def is_entity_tag(tag: str) -> bool:
    """Returns whether a tag is one of named entities: "O", or one of the letters B, I, E, S, "-" and the kind.

    Example:
        >>> is_entity_tag("O"), is_entity_tag("B-PER"), is_entity_tag("NOUN")
        (True, True, False)
    """
    return tag == "O" or (tag[:1] in ("B", "I", "E", "S") and tag[1:2] == "-" and tag[2:] != "")


def _words(row: FileRow, value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise row.refuse(f"its words are {value!r:.40}", "give each row a list of one or more words")
    return [text_of(row, word, "word") for word in value]


def _tags(row: FileRow, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        found = plural(len(value), "tag") if isinstance(value, list) else f"the tags {value!r:.40}"
        raise row.refuse(f"it has {plural(count, 'word')} and {found}", "give each word one tag")
    return [label_of(row, tag, "a tag is a text or a whole number") for tag in value]


def _check_arguments(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    for column in ("tokens", "tags"):
        if column not in dataset.column_names:
            raise missing_column(column, dataset.column_names, "dataset")
    if tokenizer.pad_token_id is None:
        hint = "set tokenizer.pad_token = tokenizer.eos_token, or use another tokenizer"
        raise unusable("the tokenizer has no padding token, which rows of different lengths need", hint)
    if not tokenizer.is_fast:
        hint = "take a tokenizer with a file 'tokenizer.json'"
        raise unusable(f"{type(tokenizer).__name__} does not say to which word a token belongs", hint)
    words = {"is_split_into_words": True, "add_special_tokens": False}
    if tokenizer(["a", "a"], **words)["input_ids"] != tokenizer("a a", add_special_tokens=False)["input_ids"]:
        logger.warning(
            "the tokenizer encodes a word of a list otherwise than the same word in a text, where a blank is before "
            "it: a pretrained model does not know such words well; give the tokenizer add_prefix_space: true"
        )


def _encode(
    tokenizer: PreTrainedTokenizerBase, max_length: int, batch: dict[str, list[Any]]
) -> dict[str, list[list[list[int]]]]:
    """Returns for each row: the ids, the labels, and whether it was cut with the number of words without a token."""
    options = {"is_split_into_words": True, "padding": False, "return_attention_mask": False, "verbose": False}
    whole = tokenizer(batch["tokens"], truncation=False, **options)
    cut = tokenizer(batch["tokens"], truncation=True, max_length=max_length, **options)
    rows = []
    for number, (tags, ids) in enumerate(zip(batch["tags"], cut["input_ids"], strict=True)):
        labels, before = [], None
        for word in cut.word_ids(number):
            labels.append(tags[word] if word is not None and word != before else _IGNORED)
            before = word
        lost = len(tags) - len({*whole.word_ids(number)} - {None})
        rows.append([ids, labels, [int(len(ids) < len(whole["input_ids"][number])), lost]])
    # `encode_rows` expects one list per row.
    return {"input_ids": rows}
