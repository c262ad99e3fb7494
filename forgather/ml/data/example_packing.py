"""Packing of whole examples: joins tokenized examples of different lengths into rows that are nearly full.

Takes a data set of token rows, such as that of `tokenize_chats`; gives rows of at most `max_length` tokens with
`input_ids`, `labels` and `position_ids`. Each row holds one or more examples, none of which is divided or left out.
`position_ids` restart at 0 at each example, so that a model keeps the examples apart, as it does with the documents of
`ml.data.packing`. Results are cached by content.

Shape suffixes: E examples, R packed rows, N tokens.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, DatasetInfo

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.packing import read_rows, rows_writer
from forgather.ml.data.progress_bar import show_progress
from forgather.ml.data.row_epoch import is_block
from forgather.ml.data.row_stream import Row, RowStream, groups, refuse_stream
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

_FORMAT = 1  # raised when the meaning of a cached folder changes
_STATS = "stats.json"
_READ_ROWS = 4096
_WRITTEN_ROWS = 512
_STREAMED_EXAMPLES = 1024
_IGNORED = -100
_IDS, _LABELS, _MASK, _POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
_DESCRIPTION = "whole examples, packed by forgather"


def pack_examples(
    dataset: Dataset | DatasetDict | Sequence[Mapping[str, Any]],
    max_length: int,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns rows of at most `max_length` tokens, each of which holds one or more whole examples.

    The examples are placed by best-fit decreasing: the longest first, each into the row in which it leaves the least
    room. In the result, rows are in the order of their first examples, and the examples of a row keep their order. The
    loss of a step is that of the same examples as separate rows, because the first token of each example has the label
    -100 and no token sees another example.

    Args:
        dataset: rows with `input_ids`, and optionally with one label per token and an `attention_mask` of ones. The
            default labels are the inputs. The splits of a `DatasetDict` are packed separately.
        max_length: the maximum length of a row in tokens.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Shapes:
        `input_ids`, `labels` and `position_ids` of a row have one length, at most `max_length`.

    Raises:
        DataError: FG943 if the rows have other columns, if a row has no tokens or more than `max_length`, or if it does
            not have one label per token.

    Example:
        >>> rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3]}]
        >>> packed = pack_examples(rows, 4)
        >>> packed["input_ids"][:], packed["labels"][:]
        ([[5, 6, 7, 3], [8, 9]], [[-100, 6, 7, -100], [-100, 9]])
        >>> packed["position_ids"][:]
        [[0, 1, 2, 0], [0, 1]]
    """
    refuse_wrong_values("data:pack_examples", locals())
    if isinstance(dataset, DatasetDict):
        return DatasetDict(
            {name: pack_examples(part, max_length, cache_dir=cache_dir) for name, part in dataset.items()}
        )
    refuse_stream(dataset, "pack_examples")
    rows = dataset if isinstance(dataset, Dataset) else Dataset.from_list([dict(row) for row in dataset])
    _check_columns(rows)
    # As Arrow tables: an epoch of Python integers would need ten times the memory.
    names = [name for name in (_IDS, _LABELS, _MASK) if name in rows.column_names]
    examples = rows.select_columns(names).with_format("arrow")
    key = content_key(format=_FORMAT, rows=rows._fingerprint, max_length=max_length)

    folder = cached_folder("packed", key, partial(_build, examples, max_length), cache_dir)
    _report(json.loads((folder / _STATS).read_text(encoding="utf-8")))
    return Dataset(read_rows(folder, key).data, info=DatasetInfo(description=_DESCRIPTION), fingerprint=key)


def pack_stream(stream: RowStream, max_length: int) -> RowStream:
    """Returns the stream of packed rows of a stream of examples, as `pack_examples` makes them.

    The examples of a row are among the 1024 that are read next. The loss of a step is that of its examples.

    Args:
        stream: rows with `input_ids` and `labels`.
        max_length: the maximum length of a row in tokens, which no example exceeds.
    """
    return stream.prepared(
        partial(_packed_rows, max_length), (_IDS, _LABELS, _POSITIONS), DatasetInfo(description=_DESCRIPTION)
    )


def _packed_rows(max_length: int, rows: Iterator[Row]) -> Iterator[Row]:
    counts = {"num_examples": 0, "num_rows": 0, "num_tokens": 0, "max_length": max_length}
    # As arrays: Python integers would need nine times the memory.
    arrays = ([np.asarray(row[name], dtype=np.int32) for name in (_IDS, _LABELS)] for row in rows)
    for examples in groups(arrays, _STREAMED_EXAMPLES):
        lengths_E = np.array([len(ids_N) for ids_N, _ in examples])
        packed = best_fit(lengths_E, max_length)
        is_first = not counts["num_rows"]
        for name, count in (("examples", len(examples)), ("rows", len(packed)), ("tokens", int(lengths_E.sum()))):
            counts[f"num_{name}"] += count
        # The rows of one block of a stream say little about an epoch.
        if is_first and not is_block():
            _report(counts)
        for numbers in packed:
            ids_N, labels_N = (np.concatenate([examples[number][part] for number in numbers]) for part in (0, 1))
            labels_N, positions_N = _with_boundaries(labels_N, lengths_E[numbers])
            yield {_IDS: ids_N.tolist(), _LABELS: labels_N.tolist(), _POSITIONS: positions_N.tolist()}


def holds_packed_examples(dataset: Any) -> bool:
    """Returns whether a data set was made by `pack_examples`, also after rows or columns were selected."""
    return getattr(getattr(dataset, "info", None), "description", None) == _DESCRIPTION


def best_fit(lengths_E: Sequence[int] | np.ndarray, max_length: int) -> list[list[int]]:
    """Returns the numbers of the examples of each row, by best-fit decreasing. Equal lengths give equal rows.

    Args:
        lengths_E: the length of each example, at most `max_length`.
        max_length: the maximum length of a row.

    Example:
        >>> best_fit([3, 2, 1, 2], 4)
        [[0, 2], [1, 3]]
    """
    packed: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `rows_by_room`, sorted
    lengths = np.asarray(lengths_E).tolist()
    for number in np.argsort(-np.asarray(lengths_E), kind="stable").tolist():
        place = bisect_left(rooms, lengths[number])
        if place == len(rooms):
            row, room = len(packed), max_length
            packed.append([])
        else:
            room = rooms[place]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[place]
        packed[row].append(number)
        if left := room - lengths[number]:
            if left not in rows_by_room:
                rows_by_room[left] = []
                insort(rooms, left)
            rows_by_room[left].append(row)
    return sorted(sorted(row) for row in packed)


def _build(examples: Dataset, max_length: int, folder: Path) -> None:
    lengths_E = _lengths(examples, max_length)
    packed = best_fit(lengths_E, max_length)
    _write(folder, examples, packed)
    counts = {"num_examples": len(lengths_E), "num_rows": len(packed), "num_tokens": int(lengths_E.sum())}
    (folder / _STATS).write_text(json.dumps({**counts, "max_length": max_length}), encoding="utf-8")


def _report(stats: Mapping[str, int]) -> None:
    # A warning, as other facts that the beginning of a run shows.
    logger.warning(
        "%s packed into %s of at most %d tokens, %.1f%% filled",
        plural(stats["num_examples"], "example"),
        plural(stats["num_rows"], "row"),
        stats["max_length"],
        100 * stats["num_tokens"] / (stats["num_rows"] * stats["max_length"]),
    )


def _check_columns(rows: Dataset) -> None:
    names = rows.column_names
    if _POSITIONS in names:
        raise _refused("the rows have position_ids, so they are packed already", "give rows of one example each")
    if _IDS not in names:
        raise _refused(
            f"the rows have no column {_IDS!r} (there are {', '.join(names) or 'none'})",
            "give rows of token ids, as tokenize_chats makes them; preference pairs and streams cannot be packed",
        )
    if others := [name for name in names if name not in (_IDS, _LABELS, _MASK)]:
        raise _refused(f"the column {others[0]!r} is not of tokens and cannot be packed", "remove the column")


def _lengths(examples: Dataset, max_length: int) -> np.ndarray:
    found, first = [], 0
    for batch in examples.iter(batch_size=_READ_ROWS):
        lengths_E = _list_lengths(batch, _IDS, first)
        if len(wrong := np.flatnonzero((lengths_E < 1) | (lengths_E > max_length))):
            place = int(wrong[0])
            raise _refused(
                f"row {first + place} has {plural(int(lengths_E[place]), 'token')}, and a row holds 1 to {max_length}",
                "cut the examples when they are tokenized (max_length), or raise max_length",
            )
        for name in batch.column_names[1:]:
            if len(wrong := np.flatnonzero(_list_lengths(batch, name, first) != lengths_E)):
                raise _refused(f"row {first + int(wrong[0])} does not have one value of {name!r} for each token")
        if _LABELS in batch.column_names:
            _check_targets(batch, lengths_E, first)
        if _MASK in batch.column_names and pc.min(pc.list_flatten(batch[_MASK])).as_py() != 1:
            raise _refused("an attention_mask is 0 in places", "pack rows without padding")
        found.append(lengths_E)
        first += len(lengths_E)
    if not found:
        raise _refused("there are no rows", "see what the data set is made from: 'fgcli data show'")
    return np.concatenate(found)


def _check_targets(batch: pa.Table, lengths_E: np.ndarray, first: int) -> None:
    """Raises an error if labels are not the tokens themselves: the first one of an example would be lost."""
    labels_T, ids_T = (np.asarray(pc.list_flatten(batch[name]).fill_null(0)) for name in (_LABELS, _IDS))
    if len(wrong := np.flatnonzero((labels_T != ids_T) & (labels_T != _IGNORED))):
        row = first + int(np.searchsorted(np.cumsum(lengths_E), wrong[0], side="right"))
        hint = "rows whose tokens have classes (tokenize_tagged) are padded, not packed"
        raise _refused(f"row {row} has labels that are not its tokens", hint)


def _list_lengths(batch: pa.Table, name: str, first: int) -> np.ndarray:
    kind = batch.schema.field(name).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        hint = "a classifier has one label for each row: its rows cannot be packed"
        raise _refused(f"{name!r} of row {first} is not a list with one value for each token", hint)
    return np.asarray(pc.list_value_length(batch[name]).fill_null(0))


def _write(folder: Path, examples: Dataset, packed: list[list[int]]) -> None:
    schema = pa.schema(dict.fromkeys((_IDS, _LABELS, _POSITIONS), pa.list_(pa.int32())))

    def parts() -> Iterator[list[list[int]]]:
        for begin in range(0, len(packed), _WRITTEN_ROWS):
            yield packed[begin : begin + _WRITTEN_ROWS]

    with rows_writer(folder, schema) as writer:
        for part in show_progress(parts(), total=len(packed), what="packing", logger=logger):
            # Read in the order in which they are written, so that the values of the rows follow one another.
            taken = examples[[number for row in part for number in row]]
            lengths_E = np.asarray(pc.list_value_length(taken[_IDS]))
            starts_E = lengths_E.cumsum() - lengths_E
            ids_N = np.asarray(pc.list_flatten(taken[_IDS]), dtype=np.int32)
            labels_N = ids_N
            if _LABELS in taken.column_names:
                labels_N = np.asarray(pc.list_flatten(taken[_LABELS]), dtype=np.int32)
            labels_N, positions_N = _with_boundaries(labels_N, lengths_E)
            examples_R = np.cumsum([0, *map(len, part)])
            offsets = pa.array(np.append(starts_E, len(ids_N))[examples_R], pa.int32())
            columns = [pa.ListArray.from_arrays(offsets, pa.array(flat_N)) for flat_N in (ids_N, labels_N, positions_N)]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _with_boundaries(labels_N: np.ndarray, lengths_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels without those of first tokens, and positions that restart at each example.

    Shapes:
        labels_N: (N,), the examples one after another. lengths_E: (E,), with the sum N. Returns (N,) and (N,).
    """
    starts_E = lengths_E.cumsum() - lengths_E
    labels_N = labels_N.copy()
    # It would otherwise be predicted from the end of the example before.
    labels_N[starts_E] = _IGNORED
    return labels_N, np.arange(len(labels_N), dtype=np.int32) - np.repeat(starts_E, lengths_E).astype(np.int32)


def _refused(what: str, hint: str = "give one value for each token") -> DataError:
    return DataError(f"the examples cannot be packed: {what}", code="FG943", hint=hint).about("dataset")
