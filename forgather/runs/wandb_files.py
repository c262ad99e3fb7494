"""Reads the local files of W&B: `wandb/run-*/run-*.wandb` and `wandb/offline-run-*/run-*.wandb`.

The input is a path; the output is a `ForeignRun` for each run. A file is a log in the format of LevelDB, whose records
are messages of Protocol Buffers. Only the fields that an import needs are described here: their numbers never change,
and so the package `wandb` need not be installed.

Source: `wandb/proto/wandb_internal.proto`, and LevelDB's log format with the header of W&B.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from forgather.bounded import open_regular
from forgather.runs.foreign_run import DamagedFileError, ForeignRun, found_files, instant, metric_names
from forgather.runs.labels import Labels

FILES = re.compile(r"^run-.+\.wandb$")
_HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK = 1 << 15
_FRAME = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_STEPS = ("train/global_step", "global_step", "trainer/global_step", "_step")
"""The names under which callbacks log the step; the last one counts the calls of `wandb.log`."""
_MESSAGES = {
    "Item": {"key": (1, "string", False), "nested_key": (2, "string", True), "value_json": (16, "string", False)},
    "Items": {"item": (1, "Item", True)},
    "Time": {"seconds": (1, "int64", False), "nanos": (2, "int32", False)},
    "Run": {
        "run_id": (1, "string", False), "entity": (2, "string", False), "project": (3, "string", False),
        "config": (4, "Items", False), "run_group": (6, "string", False), "display_name": (8, "string", False),
        "notes": (9, "string", False), "tags": (10, "string", True), "start_time": (17, "Time", False),
    },
    "Exit": {"exit_code": (1, "int32", False)},
    "Record": {
        "history": (2, "Items", False), "config": (5, "Items", False), "run": (17, "Run", False),
        "exit": (18, "Exit", False),
    },
}  # fmt: skip


def runs_of(top: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each file of a run; a run that was resumed has several.

    Raises:
        ProjectError: FG580 if there is no such file.
    """
    for file in found_files(top, FILES):
        yield file, [file]


def read_run(file: str, files: list[str], top: str) -> ForeignRun:
    """Returns the run that a file describes.

    Args:
        file: the file.
        files: the file, once more.
        top: the path that the user named.

    Raises:
        DamagedFileError: if the file cannot be read.
        OSError: if the file cannot be opened.
    """
    run: Any = None
    exit_code: int | None = None
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    with open_regular(file) as stream:
        content = stream.read()
    errors = import_module("google.protobuf.message")
    for at, record in _records(content):
        try:
            message = _message("Record").FromString(record)
        except errors.DecodeError:
            raise DamagedFileError(f"at byte {at:,} is no record") from None
        if message.HasField("run"):
            run = message.run
            config |= _items(message.run.config)
        if message.HasField("config"):
            config |= _items(message.config)
        if message.HasField("history"):
            history.append(_items(message.history))
        if message.HasField("exit"):
            exit_code = message.exit.exit_code
    if run is None:
        raise DamagedFileError("it says nothing about a run")
    lines, left_out = _lines(history)
    config.pop("_wandb", None)
    return ForeignRun(
        tool="wandb",
        # A resumed run has a file for each part, and each part its own lines.
        identity=f"{run.entity}/{run.project}/{run.run_id}/{os.path.basename(os.path.dirname(os.path.abspath(file)))}",
        name=run.display_name or run.run_id,
        source=file,
        project=run.project or None,
        started=instant(run.start_time.seconds + run.start_time.nanos / 1e9),
        status=None if exit_code is None else "failed" if exit_code else "finished",
        config=_plain_config(config),
        lines=lines,
        labels=Labels(group=run.run_group or None, tags=tuple(sorted(set(run.tags))), note=run.notes or None),
        left_out=left_out,
    )


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields position and content of each record; an incomplete last one is left out."""
    if not content.startswith(_HEADER):
        raise DamagedFileError("it does not begin as a file of W&B does")
    position, parts, begin = len(_HEADER), b"", 0
    is_open = False
    while position + _FRAME.size <= len(content):
        if (left := _BLOCK - position % _BLOCK) < _FRAME.size:
            position += left
            continue
        checksum, size, kind = _FRAME.unpack_from(content, position)
        data = content[position + _FRAME.size : position + _FRAME.size + size]
        # No record continues in the next block, so this length is not that of an incomplete record.
        if size > left - _FRAME.size:
            raise DamagedFileError(f"it is damaged at byte {position:,}: a record is longer than its block")
        if len(data) < size:
            return
        if (checksum, size, kind) == (0, 0, 0):
            # Space that was reserved and never written, as after a power cut.
            position += left
            continue
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise DamagedFileError(f"it is damaged at byte {position:,}: a record has another checksum")
        if (kind in (_MIDDLE, _LAST)) is not is_open:
            raise DamagedFileError(f"it is damaged at byte {position:,}: a part of a record is missing")
        if kind in (_FULL, _FIRST):
            parts, begin = b"", position
        is_open = kind in (_FIRST, _MIDDLE)
        parts += data
        position += _FRAME.size + size
        if kind in (_FULL, _LAST):
            yield begin, parts


def _items(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in (*message.item,):
        try:
            value = json.loads(item.value_json)
        except (ValueError, RecursionError):
            raise DamagedFileError(f"the value of {item.key or '.'.join(item.nested_key)!r} is not JSON") from None
        found[item.key or ".".join(item.nested_key)] = value
    return found


def _lines(history: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Returns lines of metrics, and how many values are not numbers."""
    counted = next((name for name in _STEPS if any(_is_step(line.get(name)) for line in history)), "_step")
    is_inner = {"_step", "_runtime", "_timestamp", counted}
    names = metric_names(name for line in history for name in line if name not in is_inner)
    lines: list[dict[str, Any]] = []
    left_out, step = 0, 0
    for line in history:
        step = int(line[counted]) if _is_step(line.get(counted)) else step
        at = instant(line["_timestamp"]) if _is_number(line.get("_timestamp")) else None
        values = {own: line[name] for name, own in names.items() if name in line}
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        left_out += len(values) - len(numbers)
        if numbers:
            lines.append({"step": step, **({} if at is None else {"time": at}), **numbers})
    return lines, left_out


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: Any) -> bool:
    return _is_number(value) and abs(value) < 1 << 53


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config; files that W&B writes next to it have each value under a key `value`."""
    return {
        name: value["value"] if isinstance(value, Mapping) and set(value) == {"value"} else value
        for name, value in config.items()
    }


@cache
def _messages() -> Any:
    """Returns the pool of the messages that are read."""
    descriptors = import_module("google.protobuf.descriptor_pb2")
    file = descriptors.FileDescriptorProto(name="forgather_wandb.proto", package="forgather_wandb", syntax="proto3")
    field_class = descriptors.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, is_repeated) in fields.items():
            label = field_class.LABEL_REPEATED if is_repeated else field_class.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if kind in _MESSAGES:
                added.type, added.type_name = field_class.TYPE_MESSAGE, f".forgather_wandb.{kind}"
            else:
                added.type = getattr(field_class, f"TYPE_{kind.upper()}")
    pool = import_module("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    return pool


@cache
def _message(name: str) -> Any:
    descriptor = _messages().FindMessageTypeByName(f"forgather_wandb.{name}")
    return import_module("google.protobuf.message_factory").GetMessageClass(descriptor)
