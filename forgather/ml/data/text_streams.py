"""Streamed texts: rows of JSON lines, lines of plain text and rows of parquet files, read while a run trains on them.

Takes files; gives a `RowStream` of rows with a text, as `ml.data.sources` gives them stored, or with all columns. Rows
without text are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from forgather.ml.data.data_errors import DataError, missing_column, no_text
from forgather.ml.data.json_rows import is_list, not_utf8, unreadable, values_of_lines
from forgather.ml.data.line_parts import Line
from forgather.ml.data.parquet_shards import ParquetShards
from forgather.ml.data.row_stream import RowStream
from forgather.ml.data.shards import Row


def json_stream(files: Sequence[str], text_column: str | None, *, buffer_size: int, seed: int) -> RowStream:
    """Returns the stream of the rows of JSON lines.

    Args:
        files: the files.
        text_column: the column with the text, which is named `text` in the stream; None for all columns.
        buffer_size: the number of rows among which the next one is drawn at random; 0 for the order of the files.
        seed: the seed of the order.

    Raises:
        DataFileError: FG834 if a file cannot be read.
        DataError: FG982 if a file is one list; FG831, FG832 or FG833 if the first row has no text.
    """
    if whole := [file for file in files if is_list(file)]:
        raise DataError(
            f"{whole[0]!r} is one list, which can only be read as a whole, and the rows are to be streamed",
            code="FG982",
            hint="write one object per line, or set streaming: false",
        ).about("paths")
    return RowStream.of_lines(files, partial(_json_rows, text_column), buffer_size=buffer_size, seed=seed)


def line_stream(files: Sequence[str], *, buffer_size: int, seed: int) -> RowStream:
    """Returns the stream of the lines of text files; see `json_stream`."""
    return RowStream.of_lines(files, _lines, buffer_size=buffer_size, seed=seed)


def parquet_stream(files: Sequence[str], text_column: str | None, *, buffer_size: int, seed: int) -> RowStream:
    """Returns the stream of the rows of parquet files, whose row groups are the shards; see `json_stream`."""
    columns = None if text_column is None else [text_column]
    stream = RowStream.of_shards(ParquetShards(files, columns), buffer_size=buffer_size, seed=seed)
    if text_column is None:
        return stream
    if text_column not in stream.column_names:
        raise missing_column(text_column, stream.column_names, "text_column")
    return stream.prepared(partial(_texts, text_column), ["text"])


def _json_rows(text_column: str | None, lines: Iterable[Line]) -> Iterator[Row]:
    for _, place, value in values_of_lines(lines):
        if not isinstance(value, dict):
            raise unreadable(place, "it is not a JSON object")
        if text_column is None:
            yield value
        elif text := _text(value, text_column, f"{place}: "):
            yield {"text": text}


def _texts(text_column: str, rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if text := _text(row, text_column, ""):
            yield {"text": text}


def _text(row: Mapping[str, Any], column: str, place: str) -> str | None:
    if column not in row:
        error = missing_column(column, list(row), "text_column")
        error.message = f"{place}{error.message}"
        raise error
    text = row[column]
    if text is None or isinstance(text, str):
        return text
    raise no_text(column, type(text).__name__, place=place)


def _lines(lines: Iterable[Line]) -> Iterator[Row]:
    for line in lines:
        try:
            text = line.text.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise not_utf8(line.file, error, "plain text in UTF-8") from None
        if text:
            yield {"text": text}
