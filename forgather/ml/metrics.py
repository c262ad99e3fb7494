"""Reading and writing of JSON lines files with the metrics and samples of a run.

`LineWriter` appends records. Each line is written by one system call and is strict JSON: numbers that are not finite
are written as the strings "nan", "inf" and "-inf". Readers ignore an incomplete last line, and it is removed before the
next line is written. When a run is resumed, `resume_lines` removes the lines of steps after the resumed step.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.errors import TrainingError
from forgather.redaction import known_hidden
from forgather.source import Span

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
# Metrics that differ between two equal runs.
_OF_THE_MACHINE = re.compile(
    r"(^|_)(time|runtime|seconds|memory_bytes|per_second)$|_per_second$|^memory_|^(mfu|recompilations|data_wait_share|communication_share)$"
)
_CHUNK_BYTES = 1 << 16
_LONGEST_NUMBER = 300
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsError(TrainingError, ValueError):
    """Raised if a line of a metrics file is not a record."""

    code = "FG851"


class LineWriter:
    """A writer that appends records to a JSON lines file.

    The file is opened when the first record is written. A record that cannot be written (for example because the disk
    is full) is dropped, so that a run does not end because of its log. The first such failure logs a warning.

    Args:
        file: the file to append to. Its folder is created if it does not exist.
        warns: False to drop records without a warning, for a second file with the same records.
    """

    def __init__(self, file: str | os.PathLike[str], *, warns: bool = True) -> None:
        self.file = Path(file)
        self._descriptor: int | None = None
        self._warned = not warns

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends `record` as one line."""
        line = _line(record)
        try:
            if self._descriptor is None:
                self._descriptor = _open_repaired(self.file)
            if os.write(self._descriptor, line) != len(line):
                self.close()  # disk full: opening the file for the next record removes the incomplete line
                raise OSError("no space left for a whole line")
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("%s cannot be written (%s); records are dropped", self.file, error)

    def close(self) -> None:
        """Closes the file. Writing another record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def resume_lines(
    file: str | os.PathLike[str],
    records: Sequence[Mapping[str, Any]],
    begin: int | None,
    *,
    name: str | None = None,
    step: int | None = None,
) -> int:
    """Makes a metrics file match the step from which a run is resumed.

    Afterwards the run's part of the file contains `records`, and no lines of steps that will be repeated. Matching
    lines that exist stay unchanged, including their times. Records that are missing from the file are written: the file
    may be a new one, or a crashed machine may have lost the last seconds. Lines of earlier runs stay. Records without a
    step or with another name stay too, since several runs may write to one file at the same time.

    Args:
        file: the metrics file of the run, which may not exist yet.
        records: the records that the run had written up to the resumed step.
        begin: the byte offset at which the run's part of the file begins. None to search for the run's first record.
        name: the value of "name" in the run's records; None if the records have no such entry.
        step: the resumed step. Lines with an `event` that are not among the records stay up to this step; None for the
            step of the last record.

    Returns:
        The byte offset at which the run's part of the file begins.
    """
    path = Path(file)
    content = path.read_bytes() if path.exists() else b""
    is_known = begin is not None and 0 <= begin <= len(content)
    before = (
        _lines_before(content, records)
        if begin is None or not is_known
        else content[: content.rfind(b"\n", 0, begin) + 1]
    )
    lines = content[len(before) :].split(b"\n")[:-1]
    until = (records[-1]["step"] if records else 0) if step is None else step
    stays, same = _lines_to_keep(lines, [_comparable(as_json(record)) for record in records], name, until)
    whole = stays.index(False) if False in stays else len(lines)
    kept = len(before) + sum(len(line) + 1 for line in lines[:whole])
    later = b"".join(line + b"\n" for line, is_kept in zip(lines[whole:], stays[whole:], strict=True) if is_kept)
    later += b"".join(_line(record) for record in records[same:])
    if later or kept < len(content):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as stream:
            stream.truncate(kept)
            stream.seek(kept)
            stream.write(later)
    return len(before)


def _lines_to_keep(
    lines: Sequence[bytes], records: Sequence[Any], name: str | None, until: int
) -> tuple[list[bool], int]:
    """Returns, for each line, whether it stays in the file, and how many of the first records the file already has."""
    stays, same, is_behind = [], 0, True
    for line in lines:
        record = _parsed(line)
        if record is not None and ("step" not in record or record.get("name") != name):
            stays.append(True)
            continue
        is_next = is_behind and same < len(records) and _comparable(record) == records[same]
        if record is not None and "event" in record and not is_next:
            # It happened at the step of the checkpoint, after that was taken: as the request that asked for it.
            is_late = isinstance(record["step"], int) and record["step"] <= until
            stays.append(is_late and _comparable(record) not in records[same:])
            continue
        # After the first line that differs, every line of the run with a step is removed: the step will be repeated.
        is_behind = is_next
        same += is_behind
        stays.append(is_behind)
    return stays, same


def _lines_before(content: bytes, records: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the lines before the last line that equals the first record, or all complete lines if there is none."""
    lines = content.split(b"\n")[:-1]
    first = _comparable(as_json(records[0])) if records else None
    # From the end: an earlier run in the same file may have an equal first record.
    for number in range(len(lines) - 1, -1, -1):
        if records and _comparable(_parsed(lines[number])) == first:
            return b"".join(line + b"\n" for line in lines[:number])
    return b"".join(line + b"\n" for line in lines)


def end_of_lines(file: str | os.PathLike[str]) -> int:
    """Returns the byte offset after the last complete line, or 0 if there is no file.

    Units:
        bytes.
    """
    path = Path(file)
    return path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0


def _comparable(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    # Compared as strings: NaN is not equal to itself.
    return None if record is None else {name: str(value) for name, value in repeatable_metrics(record).items()}


def repeatable_metrics(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics that are bit-identical if a run is repeated: all except times, rates and memory.

    Example:
        >>> repeatable_metrics({"loss": 2.5, "epoch": 1.0, "eval_runtime": 3.0, "tokens_per_second": 9.0})
        {'loss': 2.5, 'epoch': 1.0}
    """
    return {name: value for name, value in logs.items() if not _OF_THE_MACHINE.search(name)}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of a metrics file.

    Args:
        path: the path of the file, or of the folder of a run.

    Returns:
        One dict per line, in the order of the file. An incomplete last line is left out.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsError: FG851 if a line before the last one is not a JSON object. The error names the line.
    """
    file = Path(path)
    if file.is_dir():
        file = file / METRICS_FILE
    return read_records(file)


def read_records(file: str | os.PathLike[str], *, strict: bool = True, begin: int = 0) -> list[dict[str, Any]]:
    """Returns the records of a JSON lines file.

    Args:
        file: the path of the file.
        strict: True to raise an error if a line is not a record; False to leave such lines out.
        begin: the byte offset at which reading starts.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsError: FG851 if `strict` is True and a line before the last one is not a JSON object.
    """
    lines = Path(file).read_bytes()[begin:].split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parsed(line)
        if record is not None:
            records.append(record)
        elif strict and number < len(lines):
            raise MetricsError(
                f"line {number} of {str(file)!r} is not a JSON object",
                span=Span(str(file), number),
                hint="only the last line may be incomplete; remove this one",
            )
    return records


def step_seconds(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the measured time of an optimizer step: the median of the log lines, without the first quarter of them.

    The first steps allocate memory and fill caches. None if no line has a speed.

    Args:
        records: the lines of a metrics file.

    Units:
        seconds.
    """
    speeds = [record.get("steps_per_second") for record in records]
    seconds = [1 / speed for speed in speeds if isinstance(speed, int | float) and 0 < speed < math.inf]
    return statistics.median(seconds[-(-len(seconds) // 4) :] or seconds) if seconds else None


def as_json(value: Any) -> Any:
    """Returns `value` as strict JSON data.

    Tensors and NumPy values become numbers or lists. Numbers that are not finite become strings. Values of unknown
    types become their `str`.
    """
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if not isinstance(value, float) and callable(getattr(value, "tolist", None)):
        return as_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))  # the keys of `_NOT_FINITE`
    return str(value)


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(known_hidden(as_json(record)), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def whole_number(text: str) -> int | float:
    """Returns the whole number of a JSON text; infinity for one that no float is, so that readers may compute with it.

    Example:
        >>> whole_number("12"), whole_number("9" * 400)
        (12, inf)
    """
    return int(text) if len(text) < _LONGEST_NUMBER else float(text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_int=whole_number)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return {key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def _open_repaired(file: Path) -> int:
    """Opens a file for appending, after removing an incomplete last line or adding a missing final line end."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # With O_APPEND, lines of several runs that write the same file do not overwrite one another.
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor  # a pipe or a device has no last line
    begin, last = _last_line(descriptor)
    if last and _parsed(last) is None:
        os.ftruncate(descriptor, begin)
    elif last:
        os.write(descriptor, b"\n")
    return descriptor


def _last_line(descriptor: int) -> tuple[int, bytes]:
    """Returns the byte offset of the text after the last line end, and that text."""
    begin, last = os.lseek(descriptor, 0, os.SEEK_END), b""
    while begin > 0 and b"\n" not in last:
        length = min(begin, _CHUNK_BYTES)
        begin -= length
        os.lseek(descriptor, begin, os.SEEK_SET)
        last = os.read(descriptor, length) + last
    end = last.rfind(b"\n") + 1
    return begin + end, last[end:]
