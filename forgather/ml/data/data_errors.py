"""Errors of the data modules, and hints for data sets whose rows consist of a prompt and a completion.

Each error class also derives from the builtin exception that a caller would catch: ValueError or OSError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgather.errors import ForgatherError, TrainingError, first_line, nearest


class DataError(TrainingError, ValueError):
    """An error in the content of a data set or in an argument of a data function."""

    code = "FG832"


class DataFileError(TrainingError, OSError):
    """An error about a data file or data set that is missing or cannot be read."""

    code = "FG830"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


# Pairs of column names in common instruction data sets.
_EXAMPLES = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("instruction", "response"),
    ("instruction", "output"),
)
_FURTHER = ("input", "context", "system")  # columns next to an instruction or a question that belong to the prompt


def row_place(number: int, file: str | None = None, *, is_line: bool = False) -> str:
    """Returns the place of a row for messages: its line, if it has one, otherwise its index.

    Args:
        number: the number of its line, counted from 1, or its index in the list or data set, counted from 0, as
            `fgcli data show --rows` counts.
        file: the path of the file; None for a row of a data set.
        is_line: whether `number` is that of a line.

    Example:
        >>> row_place(3, "chats.jsonl", is_line=True), row_place(2, "chats.json"), row_place(2)
        ('chats.jsonl:3', 'row 2 of chats.json', 'row 2 of the data set')
    """
    return f"{file}:{number}" if is_line else f"row {number} of {'the data set' if file is None else file}"


def example_columns(columns: Sequence[str]) -> tuple[str, str] | None:
    """Returns the names of the prompt column and the completion column, or None if no known pair of names occurs.

    Example:
        >>> example_columns(["id", "question", "answer"]), example_columns(["text"])
        (('question', 'answer'), None)
    """
    return next((pair for pair in _EXAMPLES if set(pair) <= set(columns)), None)


def unread_column_warning(column: str, columns: Sequence[str]) -> str:
    """Returns a warning if only one column of a prompt and completion pair is read as text, else "".

    Args:
        column: the name of the column that is read.
        columns: the names of all columns of the data set.
    """
    pair = example_columns(columns)
    if pair is None or column not in pair:
        return ""
    other = pair[column == pair[0]]
    return f"the rows are examples, and {column!r} alone is read, without {other!r}: {_pair_hint(pair, columns)}"


def missing_column(name: str, columns: Sequence[str], argument: str) -> DataError:
    """Returns the FG831 error for a column that a data set does not have. The error lists the existing columns.

    Args:
        name: the name of the missing column.
        columns: the names of all columns of the data set.
        argument: the name of the argument in which the column was given.
    """
    pair = example_columns(columns)
    return DataError(
        f"the data set has no column {name!r}",
        code="FG831",
        hint=_pair_hint(pair, columns) if pair and argument == "text_column" else _column_hint(name, columns, argument),
        expected=list(columns),
        found=name,
    ).about(argument)


CHAT_HINT = "conversations are read by forgather.ml.data:chats, as in the template 'datasets/chat.yaml'"
CHAT_COLUMNS = frozenset({"messages", "conversations"})


def file_unreadable(place: str, error: Exception) -> DataFileError:
    """Returns the FG834 error for a shard that the system, or the library of its format, cannot read on.

    Args:
        place: the name of the shard.
        error: the error of the read.
    """
    found: DataFileError = DataFileError(
        f"{place} cannot be read: {first_line(error)}",
        code="FG834",
        hint="files must stay as they are while a run reads them; data_retries repeats reads that failed",
    )
    found.argument = "paths"
    return found


def no_text(column: str, kind: str, *, place: str = "", argument: str = "text_column") -> DataError:
    """Returns the FG833 error for a column that holds something other than text.

    Args:
        column: the name of the column.
        kind: the name of what it holds.
        place: the row in which it was found, for the beginning of the message.
        argument: the name of the argument in which the column was given.
    """
    hint = CHAT_HINT if column in CHAT_COLUMNS else "name a column of strings"
    return DataError(f"{place}column {column!r} holds {kind}, not text", code="FG833", hint=hint).about(argument)


def refuse_no_text(dataset: Any, column: str) -> None:
    """Raises FG833 if a column of a data set of `datasets` is declared to hold something other than text.

    Args:
        dataset: the data set; one without declared columns is not refused.
        column: the name of the column.
    """
    # A transform of the user may make texts of other columns.
    if getattr(dataset, "format", {}).get("type") == "custom":
        return
    feature = (getattr(dataset, "features", None) or {}).get(column)
    kind = getattr(feature, "dtype", None) if type(feature).__name__ == "Value" else type(feature).__name__
    if feature is not None and kind not in ("string", "large_string", "null"):
        raise no_text(column, str(kind))


def _column_hint(name: str, columns: Sequence[str], argument: str) -> str:
    if argument == "text_column" and CHAT_COLUMNS & set(columns):
        return CHAT_HINT
    # A near match is a likely typo; otherwise the list of columns is the better hint.
    near = nearest(name, list(columns)) or ""
    return near if near.startswith("did you mean") else f"give {argument} one of the columns: {', '.join(columns)}"


def _pair_hint(pair: tuple[str, str], columns: Sequence[str]) -> str:
    further = [repr(column) for column in _FURTHER if column in columns]
    join = f"; join {' and '.join(further)} to the prompt before, or it is left out" if further else ""
    return (
        f"keep all columns (text_column: ~) and take forgather.ml.data:tokenize_examples with prompt_column: {pair[0]} "
        f"and completion_column: {pair[1]}, which learns the completion and not the prompt{join}"
    )
