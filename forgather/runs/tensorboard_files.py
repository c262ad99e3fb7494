"""Reads event files of TensorBoard.

The input is a path; the output is one `ForeignRun` for each folder with event files, as TensorBoard shows them. Steps
that were trained again after a restart are left out where the writer says so (`purge_step`). The messages are those of
the package `tensorboard`; nothing of torch or TensorFlow is imported.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from forgather.bounded import open_regular
from forgather.runs.foreign_run import DamagedFileError, ForeignRun, found_files, grouped, instant, metric_names

FILES = re.compile(r"\.tfevents\.")
_HEAD = struct.Struct("<QI")
_MAX_SCALAR_BYTES = 1 << 16
"""Larger events are pictures, graphs or audio. Their checksums, computed byte by byte, would take minutes."""
_MAX_EVENT_BYTES = 1 << 30
_TEXTS = frozenset(("args/text_summary", "args"))


def runs_of(top: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder with event files, and its files in the order in which they were begun.

    Raises:
        ProjectError: FG580 if there is no event file.
    """
    folders: dict[str, list[str]] = {}
    for file in found_files(top, FILES):
        folders.setdefault(os.path.dirname(os.path.abspath(file)), []).append(file)
    yield from folders.items()


def read_run(folder: str, files: list[str], top: str) -> ForeignRun:
    """Returns the run that the event files of one folder describe.

    Args:
        folder: the folder.
        files: its event files.
        top: the path that the user named, from which the run gets its name.

    Raises:
        DamagedFileError: if a file cannot be read.
        OSError: if a file cannot be opened.
    """
    scalars: list[tuple[int, float, str, float]] = []
    config: dict[str, Any] = {}
    started: float | None = None
    left_out = 0
    for file in files:
        for event in _events(file):
            started = instant(event.wall_time) if started is None else started
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                scalars = [scalar for scalar in scalars if scalar[0] < event.step]
            for value in event.summary.value:
                number = _number(value)
                if number is not None:
                    scalars.append((event.step, event.wall_time, value.tag, number))
                elif value.tag in _TEXTS:
                    config = _arguments(value) or config
                else:
                    left_out += 1
    names = metric_names(tag for _, _, tag, _ in scalars)
    name = os.path.relpath(folder, top) if os.path.isdir(top) else os.path.basename(folder)
    return ForeignRun(
        tool="tensorboard",
        identity=os.path.basename(files[0]),
        name=os.path.basename(folder) if name == os.curdir else name,
        source=folder,
        started=started,
        config=config,
        lines=list(grouped((step, at, names[tag], value) for step, at, tag, value in scalars)),
        left_out=left_out,
    )


def _events(file: str) -> Iterator[Any]:
    """Yields the events of a file; an incomplete last one is left out."""
    proto = import_module("tensorboard.compat.proto.event_pb2")
    errors = import_module("google.protobuf.message")
    with open_regular(file) as stream:
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            size, checksum = _HEAD.unpack(head)
            at = stream.tell() - len(head)
            if checksum != _masked_crc(head[:8]) or size > _MAX_EVENT_BYTES:
                raise DamagedFileError(f"it is damaged at byte {at:,}: the length of an event has another checksum")
            content, tail = stream.read(size), stream.read(4)
            if len(tail) < 4:
                return
            if size > _MAX_SCALAR_BYTES:
                continue
            if struct.unpack("<I", tail)[0] != _masked_crc(content):
                raise DamagedFileError(f"it is damaged at byte {at:,}: an event has another checksum")
            try:
                yield proto.Event.FromString(content)
            except errors.DecodeError:
                raise DamagedFileError(f"at byte {at:,} is no event") from None


def _masked_crc(content: bytes) -> int:
    checksum: int = import_module("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c(content)
    return checksum


def _number(value: Any) -> float | None:
    """Returns the number of a summary; None if it is none."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    plugin = value.metadata.plugin_data.plugin_name
    if kind != "tensor" or plugin not in ("", "scalars") or value.tensor.tensor_shape.dim:
        return None
    tensor = value.tensor
    for numbers in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
        if len(numbers) == 1:
            return float(numbers[0])
    formats = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}  # the numbers of the types in TensorFlow's types.proto
    layout = formats.get(tensor.dtype)
    if layout is None or len(tensor.tensor_content) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, tensor.tensor_content)[0])


def _arguments(value: Any) -> dict[str, Any] | None:
    """Returns the training arguments that a callback wrote as a text; None if the text is not a JSON object."""
    text = b"".join(value.tensor.string_val).decode("utf-8", "replace").strip()
    try:
        found = json.loads(text.removeprefix("```").removesuffix("```"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
