"""Rows of text with labels: for classes, for several classes at once, or for numbers.

`labelled_rows` reads JSON lines and CSV files and gives a data set in which each label is a number: the number of a
class, a list of zeros and ones, or the value of a regression. A label that cannot be one is refused with the file and
the line. `tokenize_labelled` makes the rows that a model for sequence classification takes.

Shapes:
    N rows, T tokens of a row, C classes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, List, Value
from transformers import PreTrainedTokenizerBase

from forgather.errors import nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import missing_column
from forgather.ml.data.file_rows import (
    FileRow,
    check_labels,
    class_names,
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

TASKS = ("classification", "multi_label", "regression")
_STATS = "stats.json"


def labelled_rows(
    paths: Paths,
    *,
    task: str = "classification",
    text_column: str | None = None,
    label_column: str | None = None,
    labels: Sequence[str] | None = None,
    label_separator: str = ",",
) -> Dataset:
    """Returns the rows of JSON lines and CSV files, with their labels as numbers.

    Args:
        paths: a file, a folder (whose `.jsonl`, `.json` and `.csv` files are read), a glob, or a list of these. Every
            other suffix is read as JSON lines.
        task: "classification" (one class for each row), "multi_label" (a list of classes, which may be empty) or
            "regression" (a number, or a list of numbers).
        text_column: the name of the column with the text; None for a usual name.
        label_column: the name of the column with the label; None for a usual name.
        labels: the names of the classes in the order of their numbers. None for all labels that occur, sorted. With
            names, a label in the files can be a name or a number.
        label_separator: the text between the classes of a row that are written as one string, as in a CSV file.

    Returns:
        A data set with the columns `text` and `label`. A class is a `ClassLabel` with all names.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line cannot be read.
        DataError: FG831 if a column is missing, FG975 if several could be meant; FG832 if there are no rows; FG876 if a
            label is not one of `labels`;
            FG877 if a row has no text or no label that fits the task; FG878 if the arguments cannot be used.
    """
    if task not in TASKS:
        raise unusable(f"task is {task!r}", nearest(str(task), TASKS) or f"one of: {', '.join(TASKS)}").about("task")
    if labels is not None and task == "regression":
        raise unusable(f"labels is {labels!r:.80}: a regression has none", "leave it out").about("labels")
    check_labels(labels)
    rows = rows_with_columns(paths, {"text_column": text_column, "label_column": label_column})
    read = {"classification": _one, "multi_label": _several(label_separator), "regression": _number}[task]
    given = [read(row, row.values["label_column"]) for row in rows]
    texts = [text_of(row, row.values["text_column"]) for row in rows]
    features: dict[str, Any] = {"text": Value("string")}
    if task == "regression":
        _refuse_uneven(rows, given)
        features["label"] = List(Value("float64")) if isinstance(given[0], list) else Value("float64")
    else:
        names, given = numbered_labels(rows, given, labels)
        features["label"] = List(ClassLabel(names=names))
        if task == "classification":
            given, features["label"] = [them[0] for them in given], ClassLabel(names=names)
    return stored_rows(task, {"text": texts, "label": given}, features)


def tokenize_labelled(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 256,
    *,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns the token ids of each text, with the special tokens of the tokenizer, and the label of each row.

    Args:
        dataset: the rows that `labelled_rows` returned. The splits of a `DatasetDict` are tokenized separately.
        tokenizer: a tokenizer with a padding token.
        max_length: the maximum length in tokens. Longer texts are cut; the number of these is logged.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Shapes:
        `input_ids`: (T,). `labels`: a class number; (C,) zeros and ones as floats; or the value of a regression.

    Raises:
        DataError: FG831 if a column is missing; FG878 if the tokenizer has no padding token or `max_length` is below 1.
    """
    refuse_wrong_values("data:tokenize_labelled", locals())
    if isinstance(dataset, DatasetDict):
        options: dict[str, Any] = {"num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict(
            {name: tokenize_labelled(part, tokenizer, max_length, **options) for name, part in dataset.items()}
        )
    _check_arguments(dataset, tokenizer)
    names = class_names(dataset)
    feature = dataset.features["label"]
    numbers = pa.float32() if isinstance(feature, Value) else pa.list_(pa.float32())
    kind = pa.int64() if isinstance(feature, ClassLabel) else numbers
    key = content_key(
        format=1,
        rows=dataset._fingerprint,
        tokenizer=tokenizer_digest(tokenizer),
        max_length=max_length,
        kind=str(kind),
    )

    def build(folder: Path) -> None:
        """Writes the token ids and labels of all rows into a folder of the cache, and counts what was cut."""
        stats = {"rows": len(dataset), "cut": 0}
        schema = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": kind})
        labels = iter(dataset["label"])
        with rows_writer(folder, schema) as writer:
            for batch in encode_rows(dataset, partial(_encode, tokenizer, max_length), num_proc):
                stats["cut"] += sum(lost > 0 for _, (lost,) in batch)
                targets = [_target(next(labels), names) for _ in batch]
                columns = {"input_ids": [ids for ids, _ in batch], "labels": targets}
                writer.write_batch(pa.record_batch(columns, schema=schema))
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("labelled", key, build, cache_dir)
    stats = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    report = logger.warning if stats["cut"] else logger.info
    report("%s; %d cut to %d tokens", plural(stats["rows"], "row"), stats["cut"], max_length)
    return read_rows(folder, key)


def _check_arguments(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    for column in ("text", "label"):
        if column not in dataset.column_names:
            raise missing_column(column, dataset.column_names, "dataset")
    if tokenizer.pad_token_id is None:
        hint = "set tokenizer.pad_token = tokenizer.eos_token, or use another tokenizer"
        raise unusable("the tokenizer has no padding token, which rows of different lengths need", hint)


def _encode(
    tokenizer: PreTrainedTokenizerBase, max_length: int, batch: dict[str, list[Any]]
) -> dict[str, list[list[list[int]]]]:
    options = {"padding": False, "return_attention_mask": False, "verbose": False}
    whole = tokenizer(batch["text"], truncation=False, **options)["input_ids"]
    cut = tokenizer(batch["text"], truncation=True, max_length=max_length, **options)["input_ids"]
    # `encode_rows` expects one list per row, so the ids travel with the number of tokens that were cut off.
    return {"input_ids": [[ids, [len(every) - len(ids)]] for ids, every in zip(cut, whole, strict=True)]}


def _target(label: Any, names: Sequence[str] | None) -> Any:
    if names is None or not isinstance(label, list):
        return label
    # Each class is a yes-or-no question, whose loss takes floats.
    return [float(number in label) for number in range(len(names))]


def _one(row: FileRow, value: Any) -> list[Any]:
    hint = "a class is a text or a whole number; task: multi_label takes lists of them, task: regression other numbers"
    return [label_of(row, value, hint)]


def _several(separator: str) -> Callable[[FileRow, Any], list[Any]]:
    def read(row: FileRow, value: Any) -> list[Any]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(separator) if part.strip()]
        if not isinstance(value, list):
            raise row.refuse(f"its label is {value!r:.40}", "give each row a list of classes; [] is none of them")
        return [_one(row, one)[0] for one in value]

    return read


def _number(row: FileRow, value: Any) -> Any:
    if isinstance(value, list) and value and not any(isinstance(one, list) for one in value):
        return [_number(row, one) for one in value]
    try:
        number = float(value) if not isinstance(value, bool | list) and value is not None else math.nan
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise row.refuse(
        f"its label is {value!r:.40}, which is not a number", "for names of classes set task: classification"
    )


def _refuse_uneven(rows: Sequence[FileRow], given: Sequence[Any]) -> None:
    sizes = [len(value) if isinstance(value, list) else 0 for value in given]
    for row, size in zip(rows, sizes, strict=True):
        if size != sizes[0]:
            kinds = [f"{count} numbers" if count else "one number" for count in (size, sizes[0])]
            raise row.refuse(f"its label is {kinds[0]}, and that of the first row {kinds[1]}", "give all rows as many")
