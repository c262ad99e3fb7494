"""Shards of parquet files: their row groups, see `ml.data.shards.ShardedRows`.

Takes files; gives shards. A position in a shard is a number of rows: a resumed run decodes a part of one row group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from forgather.ml.data.data_errors import file_unreadable
from forgather.ml.data.file_content import file_stamp, sampled_digest
from forgather.ml.data.shards import Offset, Row

_BATCH_ROWS = 256


class ParquetShards:
    """The row groups of parquet files.

    Args:
        files: the files.
        columns: the columns that are read; None for all.
    """

    def __init__(self, files: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)
        self._groups: list[tuple[str, int, int]] = []
        self._ranges: list[tuple[int, int]] = []
        for file in files:
            facts = pq.read_metadata(file)
            self._groups += [(file, number, facts.row_group(number).num_rows) for number in range(facts.num_row_groups)]
            self._ranges += [_range(facts.row_group(number)) for number in range(facts.num_row_groups)]

    @property
    def num_shards(self) -> int:
        """The number of row groups."""
        return len(self._groups)

    def shard_size(self, shard: int) -> int:
        """Returns the number of rows of a row group."""
        return self._groups[shard][2]

    def shard_name(self, shard: int) -> str:
        """Returns the name of the file, and the number of the row group."""
        file, number, _ = self._groups[shard]
        return _name(file, number)

    def content_digest(self, shard: int) -> str:
        """Returns a digest of samples of the bytes of a row group."""
        return sampled_digest(self._groups[shard][0], *self._ranges[shard])

    def shard_stamp(self, shard: int) -> str:
        """Returns a text that changes when the file of a row group is written again."""
        return file_stamp(self._groups[shard][0])

    def open(self, shard: int, offset: Offset = None) -> _GroupReader:
        """Returns the rows of a row group from a number of rows on."""
        file, number, _ = self._groups[shard]
        return _GroupReader(file, number, self._columns, int(offset or 0))


class _GroupReader:
    def __init__(self, file: str, group: int, columns: list[str] | None, offset: int) -> None:
        self.offset = offset
        self._name = _name(file, group)
        self._rows = islice(self._read(file, group, columns), offset, None)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        try:
            row = next(self._rows)
        except pa.ArrowInvalid as error:
            raise file_unreadable(self._name, error) from error
        self.offset += 1
        return row

    @staticmethod
    def _read(file: str, group: int, columns: list[str] | None) -> Iterator[Row]:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
                yield from batch.to_pylist()


def _range(group: Any) -> tuple[int, int]:
    """Returns the bytes of the file that hold a row group."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [min(one.data_page_offset, one.dictionary_page_offset or one.data_page_offset) for one in columns]
    ends = [begin + one.total_compressed_size for begin, one in zip(begins, columns, strict=True)]
    return min(begins, default=0), max(ends, default=0)


def _name(file: str, group: int) -> str:
    return f"{os.path.basename(file)}, row group {group}"
