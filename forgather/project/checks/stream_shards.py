"""Checks streamed training rows: whether each replica of a run reads rows of its own.

The input is calls, and the sizes of the files that they name; the output is notes. Nothing is imported but the reader
of parquet footers. What the run chooses is decided by `forgather/ml/data/virtual_streams.py`: replicas read their own
rows if they divide the number of virtual streams, and the run finds such a number if the data has as many shards.
"""

from __future__ import annotations

import glob
import os
from importlib import import_module

from forgather.bounded import TooManyEntriesError, matching_files
from forgather.config.graph import Call, Node, Scalar, Sequence
from forgather.config.path import format_path
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.setting_rules import arguments_of
from forgather.project.checks.streamed_rows import streams_of
from forgather.project.checks.subject import Subject
from forgather.project.targets import known_processes
from forgather.project.trainer_arguments import TrainerArguments, keyword, trainer_arguments
from forgather.project.world_size import processes_from_sizes

PART_BYTES = 1 << 20
"""The bytes of lines for which a stream of their own is made."""

_OF_LINES, _OF_PARQUET = (":json_lines", ":text_files"), ":parquet"


def check_stream_shards(subject: Subject) -> list[Diagnostic]:
    """Returns notes about training rows that several replicas read, of which one uses each."""
    arguments = trainer_arguments(subject.graph)
    processes = processes_from_sizes(subject.graph) or known_processes(subject.graph)
    if arguments is None or processes is None or (replicas := arguments.replicas(processes)) < 2:
        return []
    main = subject.calls.get(id(subject.graph.targets["main"].value))
    rows = None if main is None else arguments_of(main).get("train_dataset")
    streams = [] if rows is None else streams_of(rows)
    if main is None or len(streams) != 1 or _keeps_order(arguments, streams[0]):
        return []
    hint = _advice(arguments, streams[0], replicas)
    if hint is None:
        return []
    # Rows of `data_streams: 0` are not dealt out.
    once = arguments.plain("dispatch_rows") is not False and not _reads_whole(arguments)
    how = "once on each machine, and dealt out" if once else "by several replicas, and used by one"
    paths = keyword(streams[0], "paths")
    found = f"each training row is read {how}: the data is not divided among the {replicas} replicas"
    return [
        Diagnostic(
            code="FG796",
            message=found,
            severity=Severity.NOTE,
            span=paths.span if paths is not None and paths.span is not None else streams[0].span,
            path=format_path(main.path),
            hint=hint,
        )
    ]


def _advice(arguments: TrainerArguments, stream: Call, replicas: int) -> str | None:
    """Returns what to do so that each replica reads its own rows; None if it does, or if that is not known."""
    given = arguments.plain("data_streams")
    if _reads_whole(arguments):
        return "leave data_streams: 0 out, in a new run"
    if isinstance(given, int) and given % replicas == 0:
        # Each replica reads streams of its own, or there are fewer shards and the run refuses the number.
        return None
    most = _most_streams(stream, replicas)
    if isinstance(given, int) and (most is None or most >= replicas):
        return f"set data_streams: {replicas}, in a new run"
    if most is None or most >= replicas:
        return None
    if stream.constructor.endswith(_OF_LINES):
        # The number of streams that is chosen for little data is smaller than the number that it allows.
        return f"set data_streams: {replicas} in a new run, or use 'fgcli data prepare --num-shards {replicas}'"
    has = f"has {most} shard{'' if most == 1 else 's'}"
    return f"'fgcli data prepare --num-shards {replicas}' writes a shard for each replica; the data {has}"


def _reads_whole(arguments: TrainerArguments) -> bool:
    given = arguments.plain("data_streams")
    return given == 0 and given is not False


def _keeps_order(arguments: TrainerArguments, stream: Call) -> bool:
    size = keyword(stream, "buffer_size")
    return arguments.plain("train_sampling_strategy") == "sequential" or (isinstance(size, Scalar) and size.value == 0)


def _most_streams(stream: Call, replicas: int) -> int | None:
    """Returns the number of streams that a run can choose for the files of a stream; None if that is not known."""
    files = _files(stream)
    if not files or not stream.constructor.endswith((*_OF_LINES, _OF_PARQUET)):
        return None
    if stream.constructor.endswith(_OF_LINES):
        return max(1, sum(map(os.path.getsize, files)) // PART_BYTES)
    # Each file has a row group at least, so that footers are read only of few files.
    return len(files) if len(files) >= replicas else _row_groups(files)


def _row_groups(files: list[str]) -> int | None:
    try:
        parquet = import_module("pyarrow.parquet")
        return int(sum(parquet.read_metadata(file).num_row_groups for file in files))
    except (ImportError, OSError, ValueError):
        return None


def _files(stream: Call) -> list[str]:
    """Returns the files that a call reads; an empty list if it does not name them as texts, or if they are too many."""
    node = keyword(stream, "paths") or next(iter(stream.args), None)
    found: list[str] = []
    try:
        for text in _texts(node):
            path = os.path.expanduser(text)
            found += sorted(matching_files(path)) if glob.has_magic(path) else [path]
    except TooManyEntriesError:
        return []
    return found if all(map(os.path.isfile, found)) else []


def _texts(node: Node | None) -> list[str]:
    items = node.items if isinstance(node, Sequence) else (node,)
    texts = [item.value for item in items if isinstance(item, Scalar) and isinstance(item.value, str)]
    return texts if len(texts) == len(items) else []
