"""Rows of text with labels: for classes, for several classes at once, or for numbers.

`labelled_rows` reads JSON lines and CSV files and gives a data set in which each label is a number: the number of a
class, a list of zeros and ones, or the value of a regression. A label that cannot be one is refused with the file and
the line. `tokenize_labelled` makes the rows that a model for sequence classification takes.

Shapes:
    N rows, T tokens of a row, C classes.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from transformers import PreTrainedTokenizerBase

from forgather.errors import nearest
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import DataError, DataFileError, missing_column
from forgather.ml.data.json_rows import is_utf8, json_rows, unreadable
from forgather.ml.data.packing import encode_rows, read_rows, rows_writer
from forgather.ml.data.sources import Paths, find_files
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.number_format import plural

logger = logging.getLogger(__name__)

TASKS = ("classification", "multi_label", "regression")
_SUFFIXES = (".jsonl", ".json", ".csv")
_STATS = "stats.json"


class _Row(NamedTuple):
    """A row of a file, with the number of its line."""

    file: str
    line: int
    values: Mapping[str, Any]

    def refuse(self, what: str, hint: str, *, code: str = "FG877") -> DataError:
        """Returns the error for this row."""
        return DataError(f"row {self.line} of {self.file!r}: {what}", code=code, hint=hint, found=self.line)


def labelled_rows(
    paths: Paths,
    *,
    task: str = "classification",
    text_column: str = "text",
    label_column: str = "label",
    labels: Sequence[str] | None = None,
    label_separator: str = ",",
) -> Dataset:
    """Returns the rows of JSON lines and CSV files, with their labels as numbers.

    Args:
        paths: a file, a folder (whose `.jsonl`, `.json` and `.csv` files are read), a glob, or a list of these. Every
            other suffix is read as JSON lines.
        task: "classification" (one class for each row), "multi_label" (a list of classes, which may be empty) or
            "regression" (a number, or a list of numbers).
        text_column: the name of the column with the text.
        label_column: the name of the column with the label.
        labels: the names of the classes in the order of their numbers. None for all labels that occur, sorted. With
            names, a label in the files can be a name or a number.
        label_separator: the text between the classes of a row that are written as one string, as in a CSV file.

    Returns:
        A data set with the columns `text` and `label`. A class is a `ClassLabel` with all names.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line cannot be read.
        DataError: FG831 if a column is missing; FG832 if there are no rows; FG876 if a label is not one of `labels`;
            FG877 if a row has no text or no label that fits the task; FG878 if the arguments cannot be used.
    """
    _check_task(task, labels)
    rows = list(_read(find_files(paths, _SUFFIXES), (text_column, label_column)))
    if not rows:
        raise DataError("the files have no rows", code="FG832", hint="a data set needs at least one row").about("paths")
    read = {"classification": _one, "multi_label": _several(label_separator), "regression": _number}[task]
    given = [read(row, row.values[label_column]) for row in rows]
    texts = [_text(row, row.values[text_column]) for row in rows]
    features: dict[str, Any] = {"text": Value("string")}
    if task == "regression":
        _refuse_uneven(rows, given)
        features["label"] = List(Value("float64")) if isinstance(given[0], list) else Value("float64")
    else:
        names = [str(name) for name in labels] if labels is not None else _names(rows, given)
        numbers = {name: number for number, name in enumerate(names)}
        pairs = zip(rows, given, strict=True)
        given = [[_class(row, one, numbers, is_given=labels is not None) for one in them] for row, them in pairs]
        features["label"] = List(ClassLabel(names=names))
        if task == "classification":
            given, features["label"] = [them[0] for them in given], ClassLabel(names=names)
    digest = xxhash.xxh3_64_hexdigest(json.dumps([task, texts, given, str(features)]).encode())
    table = Dataset.from_dict({"text": texts, "label": given}, features=Features(features)).data
    # The fingerprint is a digest of the content, since the cache of tokens is keyed by it.
    return Dataset(table, fingerprint=digest)


def _check_task(task: str, labels: Any) -> None:
    if task not in TASKS:
        raise _unusable(f"task is {task!r}", nearest(str(task), TASKS) or f"one of: {', '.join(TASKS)}").about("task")
    if labels is not None and (isinstance(labels, str) or not isinstance(labels, Sequence)):
        raise _unusable(f"labels is {labels!r:.80}", "give a list with the names of the classes").about("labels")
    if labels is not None and (task == "regression" or len(set(labels)) < max(len(labels), 2)):
        why = "a regression has none" if task == "regression" else "two different names or more are needed"
        raise _unusable(f"labels is {list(labels)!r:.80}: {why}", "leave it out, or name each class once").about(
            "labels"
        )


def class_names(dataset: Dataset) -> list[str] | None:
    """Returns the names of the classes of a data set that `labelled_rows` returned; None for a regression.

    Args:
        dataset: the rows.

    Raises:
        DataError: FG831 if the rows have no column `label`.
    """
    if "label" not in dataset.column_names:
        raise missing_column("label", dataset.column_names, "dataset")
    feature = dataset.features["label"]
    kind = getattr(feature, "feature", feature)
    return list(kind.names) if isinstance(kind, ClassLabel) else None


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
    if isinstance(dataset, DatasetDict):
        options: dict[str, Any] = {"num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict(
            {name: tokenize_labelled(part, tokenizer, max_length, **options) for name, part in dataset.items()}
        )
    _check_arguments(dataset, tokenizer, max_length)
    names = class_names(dataset)
    feature = dataset.features["label"]
    is_list = not isinstance(feature, Value | ClassLabel)
    kind = pa.int64() if isinstance(feature, ClassLabel) else pa.list_(pa.float32()) if is_list else pa.float32()
    key = content_key(
        format=1,
        rows=dataset._fingerprint,
        tokenizer=tokenizer_digest(tokenizer),
        max_length=max_length,
        kind=str(kind),
    )

    def build(folder: Path) -> None:
        stats = {"rows": len(dataset), "cut": 0}
        schema = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": kind})
        labels = iter(dataset["label"])
        with rows_writer(folder, schema) as writer:
            for batch in encode_rows(dataset, partial(_encode, tokenizer, max_length), num_proc):
                stats["cut"] += sum(lost > 0 for _, (lost,) in batch)
                columns = {
                    "input_ids": [ids for ids, _ in batch],
                    "labels": [_target(next(labels), names) for _ in batch],
                }
                writer.write_batch(pa.record_batch(columns, schema=schema))
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("labelled", key, build, cache_dir)
    stats = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    report = logger.warning if stats["cut"] else logger.info
    report("%s; %d cut to %d tokens", plural(stats["rows"], "row"), stats["cut"], max_length)
    return read_rows(folder, key)


def _check_arguments(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    for column in ("text", "label"):
        if column not in dataset.column_names:
            raise missing_column(column, dataset.column_names, "dataset")
    if max_length < 1:
        raise _unusable(f"max_length is {max_length}", "give a number of tokens").about("max_length")
    if tokenizer.pad_token_id is None:
        hint = "set tokenizer.pad_token = tokenizer.eos_token, or use another tokenizer"
        raise _unusable("the tokenizer has no padding token, which rows of different lengths need", hint)


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


def _read(files: Sequence[str], columns: Sequence[str]) -> Iterator[_Row]:
    for file in files:
        for line, values in file_rows(file):
            for column in columns:
                if column not in values:
                    argument = "label_column" if column == columns[1] else "text_column"
                    error = missing_column(column, list(values), argument)
                    error.message = f"row {line} of {file!r} has no column {column!r}"
                    raise error
            yield _Row(file, line, values)


def file_rows(file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the rows of a CSV file or of JSON lines, each with the number of its line.

    Args:
        file: the path of the file. Every suffix but `.csv` is read as JSON lines.

    Raises:
        DataFileError: FG834 if a line cannot be read.
    """
    yield from _csv_rows(file) if file.lower().endswith(".csv") else _json_rows(file)


def _json_rows(file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, is_line, value in json_rows(file):
        if not isinstance(value, dict):
            raise unreadable(file, f"{'line' if is_line else 'row'} {number} is not a JSON object")
        yield number, value


def _csv_rows(file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    hint = "the first line names the columns, and each further line has one value for each, in UTF-8"
    reader = None
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            names = reader.fieldnames or ()
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise unreadable(file, f"two columns have the name {twice[0]!r}", hint)
            for values in reader:
                if None in values or None in values.values():
                    raise unreadable(file, f"line {reader.line_num} does not have one value for each column", hint)
                yield reader.line_num, values
    except DataFileError:
        raise
    except UnicodeDecodeError as error:
        raise unreadable(file, f"{error.reason} at byte {error.start}", hint) from None
    except OSError as error:
        raise unreadable(file, str(error.strerror or error), hint) from None
    except csv.Error as error:
        # The number is that of the last line of the row before.
        line = reader.line_num + 1 if reader is not None else 1
        raise unreadable(file, f"in the row that begins in line {line}, {str(error)[:200]}", hint) from None


def _text(row: _Row, value: Any) -> str:
    if isinstance(value, str) and value.strip():
        if not is_utf8(value):
            raise row.refuse("its text has half of a surrogate pair, which is not a character", "correct the text")
        return value
    what = "its text is empty" if isinstance(value, str) else f"its text is {value!r:.40}"
    raise row.refuse(what, "give each row a text, or remove the row")


def _one(row: _Row, value: Any) -> list[Any]:
    if isinstance(value, str | int) and not (isinstance(value, str) and not value.strip()):
        # JSON's true is a class like any other; as a number it would be the class 1.
        return [str(value).lower() if isinstance(value, bool) else value]
    if isinstance(value, str):
        raise row.refuse("its label is empty", "give each row a class, or remove the row")
    hint = "a class is a text or a whole number; task: multi_label takes lists of them, task: regression other numbers"
    raise row.refuse(f"its label is {value!r:.40}", hint)


def _several(separator: str) -> Callable[[_Row, Any], list[Any]]:
    def read(row: _Row, value: Any) -> list[Any]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(separator) if part.strip()]
        if not isinstance(value, list):
            raise row.refuse(f"its label is {value!r:.40}", "give each row a list of classes; [] is none of them")
        return [_one(row, one)[0] for one in value]

    return read


def _number(row: _Row, value: Any) -> Any:
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


def _refuse_uneven(rows: Sequence[_Row], given: Sequence[Any]) -> None:
    sizes = [len(value) if isinstance(value, list) else 0 for value in given]
    for row, size in zip(rows, sizes, strict=True):
        if size != sizes[0]:
            kinds = [f"{count} numbers" if count else "one number" for count in (size, sizes[0])]
            raise row.refuse(f"its label is {kinds[0]}, and that of the first row {kinds[1]}", "give all rows as many")


def _names(rows: Sequence[_Row], given: Sequence[Sequence[Any]]) -> list[str]:
    names = sorted({str(one) for them in given for one in them})
    if all(name.isascii() and name.isdecimal() for name in names):
        # A CSV file has numbers as texts, and must give the order of JSON lines.
        names.sort(key=int)
    if len(names) < 2:
        only = f"only the label {names[0]!r}" if names else "no label"
        raise rows[0].refuse(
            f"the rows from here on have {only}", "two classes or more are needed; name them in labels"
        )
    return names


def _class(row: _Row, value: Any, numbers: Mapping[str, int], *, is_given: bool) -> int:
    """Returns the number of a class.

    Args:
        row: the row, for the error.
        value: the label in the file.
        numbers: the numbers of the classes by name.
        is_given: whether the names were given, so that a label may also be a number.
    """
    if str(value) in numbers:
        return numbers[str(value)]
    if is_given and type(value) is int and 0 <= value < len(numbers):
        return value
    names = list(numbers)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    close = nearest(str(value), names) or ""
    raise row.refuse(
        f"the label {value!r:.40} is none of the {len(names)} classes",
        f"{close if close.startswith('did you mean') else 'correct the row, or add the class to labels'}; "
        f"the classes are: {shown}",
        code="FG876",
    )


def _unusable(message: str, hint: str) -> DataError:
    return DataError(message, code="FG878", hint=hint)
