"""Rows of JSON files: one value per line, or one list of values per file.

Takes a file; gives each value with its number, so that an error of a later stage can name its place. `datasets` itself
reads JSON into an Arrow table, which gives all rows the same fields and forgets the lines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TextIO

from forgather.ml.data.data_errors import DataFileError, row_place
from forgather.ml.data.line_parts import Line

_JSON_LINES = "one JSON object per line, or one list of objects, in UTF-8"


class JsonRow(NamedTuple):
    """A value of a JSON file.

    Args:
        number: the number of its line, counted from 1, or its index in the list of the file.
        is_line: whether `number` is that of a line.
        value: the value.
    """

    number: int
    is_line: bool
    value: Any

    def place(self, file: str) -> str:
        """Returns the place of the value for messages, as `row_place` does.

        Args:
            file: the path of the file.
        """
        return row_place(self.number, file, is_line=self.is_line)


def json_rows(file: str) -> Iterator[JsonRow]:
    """Yields the values of a JSON file. Empty lines are left out.

    Args:
        file: the path of the file, which begins with `[` if it is one list. A byte order mark is ignored.

    Raises:
        DataFileError: FG834 if the file cannot be read, is not UTF-8, or has a line that is not JSON or gives a key
            twice.
    """
    with _located(file), open(file, encoding="utf-8-sig") as stream:
        if _begins_list(stream):
            values = json.load(stream, object_pairs_hook=_mapping)
            yield from (JsonRow(number, False, value) for number, value in enumerate(values))
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield JsonRow(number, True, _value(row_place(number, file, is_line=True), line))


def values_of_lines(lines: Iterable[Line]) -> Iterator[tuple[str, str, Any]]:
    """Yields the file, the place and the value of each line that is not empty, for files that are read by lines.

    Args:
        lines: the lines of JSON files.

    Raises:
        DataFileError: FG834 if a line is not UTF-8, is not JSON, or gives a key twice.
    """
    for line in lines:
        if not line.text.strip():
            continue
        try:
            text = line.text.decode()
        except UnicodeDecodeError as error:
            raise unreadable(line.place, f"byte {error.start + 1} of the line is not UTF-8 ({error.reason})") from None
        try:
            value = _value(line.place, text)
        except RecursionError:
            raise unreadable(line.place, "its values are nested too deeply") from None
        yield line.file, line.place, value


def is_list(file: str) -> bool:
    """Returns whether a JSON file is one list of values, which can only be read as a whole.

    Args:
        file: the path of the file.

    Raises:
        DataFileError: FG834 if the file cannot be read or is not UTF-8.
    """
    with _located(file), open(file, encoding="utf-8-sig") as stream:
        return _begins_list(stream)


def _begins_list(stream: TextIO) -> bool:
    begin = stream.read(64).lstrip()[:1]
    stream.seek(0)
    return begin == "["


_OTHER_FILES = {
    b"\x1f\x8b": "it is compressed by gzip, and has to be unpacked first",
    b"BZh": "it is compressed by bzip2, and has to be unpacked first",
    b"\xfd7zXZ": "it is compressed by xz, and has to be unpacked first",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd, and has to be unpacked first",
    b"PK\x03\x04": "it is a zip archive, and has to be unpacked first",
    b"PAR1": "it is a parquet file",
    b"\xff\xfe": "it is UTF-16 text, and has to be saved as UTF-8",
    b"\xfe\xff": "it is UTF-16 text, and has to be saved as UTF-8",
}


@contextmanager
def _located(file: str) -> Iterator[None]:
    """Context manager that raises FG834 for an error of its body."""
    try:
        yield
    except DataFileError:
        raise
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None
    except OSError as error:
        raise unreadable(file, str(error.strerror or error)) from None
    except ValueError as error:
        raise unreadable(file, str(error) if isinstance(error, json.JSONDecodeError) else _reason(error)) from None
    except RecursionError:
        raise unreadable(file, "its values are nested too deeply") from None


def _value(place: str, line: str) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_mapping)
    except json.JSONDecodeError as error:
        # Only the last line of a file has no line break at its end.
        hint = (
            "a file that is one indented JSON value must be a list: [...]"
            if line.endswith("\n")
            else "the file ends inside a row, as if it had been cut off: write it again, or remove the row"
        )
        raise unreadable(place, f"it is not JSON ({error.msg})", hint) from None
    except ValueError as error:
        raise unreadable(place, _reason(error)) from None


class _RepeatedKey(ValueError):
    """Raised if an object gives a key twice."""


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # Python's reader would keep the last value, and the others would be lost.
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _RepeatedKey(f"an object has the key {name!r:.60} twice")
    return found


def _reason(error: ValueError) -> str:
    # Python limits the digits of a whole number, because the conversion takes quadratic time.
    return str(error) if isinstance(error, _RepeatedKey) else "a number has more digits than can be read"


def unreadable(place: str, reason: str, hint: str = _JSON_LINES) -> DataFileError:
    """Returns the FG834 error for a file of rows, or a row of it, that cannot be read.

    Args:
        place: the path of the file, or the place of the row (`row_place`).
        reason: what is wrong with it.
        hint: what the file should be.
    """
    error: DataFileError = DataFileError(f"{place} cannot be read: {reason}", code="FG834", hint=hint)
    error.argument = "paths"
    return error


def not_utf8(file: str, error: UnicodeDecodeError, hint: str = _JSON_LINES) -> DataFileError:
    """Returns the FG834 error for a file that is not UTF-8: what it begins like, or the first line that is wrong.

    Args:
        file: the path of the file.
        error: the error of reading it. Its position is that in a block of the file, and not that in the file.
        hint: what the file should be.
    """
    with suppress(OSError), open(file, "rb") as stream:
        begin = stream.read(8)
        if what := next((what for start, what in _OTHER_FILES.items() if begin.startswith(start)), None):
            return unreadable(file, what, hint)
        stream.seek(0)
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError as found:
                reason = f"byte {found.start + 1} of the line is not UTF-8 ({found.reason})"
                return unreadable(row_place(number, file, is_line=True), reason, hint)
    return unreadable(file, f"it is not UTF-8 ({error.reason})", hint)


def is_utf8(text: str) -> bool:
    r"""Returns whether a text can be stored: JSON can write half of a surrogate pair, which UTF-8 cannot encode.

    Example:
        >>> is_utf8("ab"), is_utf8("\ud800")
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
