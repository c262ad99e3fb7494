"""Rows of files whose labels are names: how they are read, checked and numbered.

Takes JSON lines and CSV files; gives rows that know their place, so that a row that cannot be used is refused with its
file and line. `numbered_labels` replaces the names of classes by their numbers. `stored_rows` gives a data set whose
fingerprint is a digest of its content.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from datasets import ClassLabel, Dataset, Features

from forgather.errors import nearest
from forgather.ml.data.data_errors import DataError, DataFileError, missing_column, row_place
from forgather.ml.data.json_rows import is_utf8, json_rows, not_utf8, unreadable
from forgather.ml.data.sources import Paths, find_files
from forgather.ml.data.usual_columns import chosen_columns, column_value, other_names
from forgather.ml.log import get_logger

logger = get_logger(__name__)

SUFFIXES = (".jsonl", ".json", ".csv")
"""The suffixes of the files that are read from a folder."""


class FileRow(NamedTuple):
    """A row of a file, with its place for messages. Its values have the names of the arguments that name columns."""

    file: str
    place: str
    values: Mapping[str, Any]

    def refuse(self, what: str, hint: str, *, code: str = "FG877") -> DataError:
        """Returns the error for this row."""
        return DataError(f"{self.place}: {what}", code=code, hint=hint).about("paths")


def rows_with_columns(paths: Paths, columns: Mapping[str, str | None]) -> list[FileRow]:
    """Returns the rows of JSON lines and CSV files.

    Args:
        paths: a file, a folder, a glob, or a list of these. Files whose names do not end in `.csv` are read as JSON.
        columns: the names of the columns that every row must have, by the argument in which the user gave each name;
            None for a column that the first row has under a usual name, see `usual_columns`.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line cannot be read.
        DataError: FG831 if a column is missing; FG832 if there are no rows; FG975 if several columns could be meant.
    """
    found: list[FileRow] = []
    chosen: Mapping[str, str] = {}
    for file in find_files(paths, SUFFIXES):
        for row in file_rows(file):
            if not found:
                chosen = chosen_columns(row.values, columns)
                if None in columns.values() and (shown := other_names(chosen)):
                    logger.warning("columns: %s", shown)
            own = {}
            for argument, column in chosen.items():
                try:
                    own[argument] = column_value(row.values, column)
                except KeyError:
                    error = missing_column(column, list(row.values), argument)
                    error.message = f"{row.place}: the row has no column {column!r}"
                    raise error from None
            found.append(row._replace(values=own))
    if not found:
        raise DataError("the files have no rows", code="FG832", hint="a data set needs at least one row").about("paths")
    return found


def file_rows(file: str) -> Iterator[FileRow]:
    """Yields the rows of a CSV file or of JSON lines.

    Args:
        file: the path of the file. Every suffix but `.csv` is read as JSON lines.

    Raises:
        DataFileError: FG834 if a line cannot be read.
    """
    yield from _csv_rows(file) if file.lower().endswith(".csv") else _json_rows(file)


def _json_rows(file: str) -> Iterator[FileRow]:
    for row in json_rows(file):
        if not isinstance(row.value, dict):
            raise unreadable(row.place(file), "it is not a JSON object")
        yield FileRow(file, row.place(file), row.value)


def _csv_rows(file: str) -> Iterator[FileRow]:
    hint = "the first line names the columns, and each further line has one value for each, in UTF-8"
    reader = None
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            names = reader.fieldnames or ()
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise unreadable(file, f"two columns have the name {twice[0]!r}", hint)
            for values in reader:
                place = row_place(reader.line_num, file, is_line=True)
                if None in values or None in values.values():
                    raise unreadable(place, "it does not have one value for each column", hint)
                yield FileRow(file, place, values)
    except DataFileError:
        raise
    except UnicodeDecodeError as error:
        raise not_utf8(file, error, hint) from None
    except OSError as error:
        raise unreadable(file, str(error.strerror or error), hint) from None
    except csv.Error as error:
        # The number is that of the last line of the row before.
        place = row_place(reader.line_num + 1 if reader is not None else 1, file, is_line=True)
        raise unreadable(place, f"in the row that begins here, {str(error)[:200]}", hint) from None


def text_of(row: FileRow, value: Any, what: str = "text") -> str:
    """Returns a value as a text that is not empty.

    Args:
        row: the row, for the error.
        value: the value.
        what: what the value is, for the error.

    Raises:
        DataError: FG877 if it is not a text, is empty, or cannot be stored as UTF-8.
    """
    if isinstance(value, str) and value.strip():
        if not is_utf8(value):
            raise row.refuse(
                f"its {what} has half of a surrogate pair, which is not a character", f"correct the {what}"
            )
        return value
    found = f"its {what} is empty" if isinstance(value, str) else f"its {what} is {value!r:.40}"
    raise row.refuse(found, f"give each row its {what}, or remove the row")


def label_of(row: FileRow, value: Any, hint: str) -> Any:
    """Returns a value as the label of a class: a text or a whole number.

    Args:
        row: the row, for the error.
        value: the value.
        hint: what a label may be, for the error.

    Raises:
        DataError: FG877 if it is neither.
    """
    if isinstance(value, str | int) and not (isinstance(value, str) and not value.strip()):
        if isinstance(value, str) and not is_utf8(value):
            raise row.refuse("its label has half of a surrogate pair, which is not a character", "correct the label")
        # JSON's true is a class like any other; as a number it would be the class 1.
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, str):
        raise row.refuse("its label is empty", "give each row a class, or remove the row")
    raise row.refuse(f"its label is {value!r:.40}", hint)


def check_labels(labels: Any) -> None:
    """Raises FG878 if `labels` is neither None nor a list of two or more different names."""
    if labels is not None and (isinstance(labels, str) or not isinstance(labels, Sequence)):
        raise unusable(f"labels is {labels!r:.80}", "give a list with the names of the classes").about("labels")
    if wrong := [one for one in labels or () if not isinstance(one, str | int) or not str(one).strip()]:
        raise unusable(f"labels has {wrong[0]!r:.40}", "a name is a text or a whole number").about("labels")
    if labels is not None and len({str(one) for one in labels}) < max(len(labels), 2):
        why = "two different names or more are needed"
        raise unusable(f"labels is {list(labels)!r:.80}: {why}", "leave it out, or name each class once").about(
            "labels"
        )


def numbered_labels(
    rows: Sequence[FileRow], given: Sequence[Sequence[Any]], labels: Sequence[str] | None
) -> tuple[list[str], list[list[int]]]:
    """Returns the names of the classes, and the numbers of the labels of each row.

    Args:
        rows: the rows.
        given: the labels of each row.
        labels: the names in the order of their numbers; None for all labels that occur, sorted. With names, a label can
            also be a number.

    Raises:
        DataError: FG876 if a label is not one of `labels`; FG877 if there is only one class.
    """
    names = [str(name) for name in labels] if labels is not None else _label_names(rows, given)
    numbers = {name: number for number, name in enumerate(names)}
    pairs = zip(rows, given, strict=True)
    is_given = labels is not None
    return names, [[_class_number(row, one, numbers, is_given=is_given) for one in them] for row, them in pairs]


def class_names(dataset: Dataset) -> list[str] | None:
    """Returns the names of the classes of a data set with labels or tags; None for a regression.

    Args:
        dataset: the rows that `labelled_rows`, `tagged_rows` or `image_rows` returned.

    Raises:
        DataError: FG831 if the rows have neither a column `label` nor a column `tags`.
    """
    column = next((name for name in ("label", "tags") if name in dataset.column_names), None)
    if column is None:
        raise missing_column("label", dataset.column_names, "dataset")
    feature = dataset.features[column]
    kind = getattr(feature, "feature", feature)
    return list(kind.names) if isinstance(kind, ClassLabel) else None


def stored_rows(kind: str, columns: Mapping[str, Sequence[Any]], features: Mapping[str, Any]) -> Dataset:
    """Returns a data set whose fingerprint is a digest of its content, since the cache of tokens is keyed by it.

    Args:
        kind: what the rows are, which is part of the digest.
        columns: the values of the rows, by column.
        features: the types of the columns.
    """
    # Bytes, as of an image, are the only values that JSON cannot write.
    content = json.dumps([kind, *columns.values(), str(dict(features))], default=bytes.hex).encode()
    table = Dataset.from_dict(dict(columns), features=Features(dict(features))).data
    return Dataset(table, fingerprint=xxhash.xxh3_64_hexdigest(content))


def unusable(message: str, hint: str) -> DataError:
    """Returns the FG878 error for arguments that cannot be used."""
    return DataError(message, code="FG878", hint=hint)


def _label_names(rows: Sequence[FileRow], given: Sequence[Sequence[Any]]) -> list[str]:
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


def _class_number(row: FileRow, value: Any, numbers: Mapping[str, int], *, is_given: bool) -> int:
    """Returns the number of a class.

    Args:
        row: the row, for the error.
        value: the label in the file.
        numbers: the numbers of the classes by name.
        is_given: whether the names were given, so that a label may also be a number, if no name is one.
    """
    if str(value) in numbers:
        return numbers[str(value)]
    names = list(numbers)
    # A CSV file has text only. Where a name is a number itself, a number could mean two classes.
    is_number = str(value).isdecimal() and type(value) in (int, str) and not any(name.isdecimal() for name in names)
    if is_given and is_number and int(value) < len(names):
        return int(value)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    close = nearest(str(value), names) or ""
    raise row.refuse(
        f"the label {value!r:.40} is none of the {len(names)} classes",
        f"{close if close.startswith('did you mean') else 'correct the row, or add the class to labels'}; "
        f"the classes are: {shown}",
        code="FG876",
    )
