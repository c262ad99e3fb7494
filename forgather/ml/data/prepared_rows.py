"""Prepared tokens as rows: documents that `fgcli data prepare` wrote, read from memory-mapped files.

Takes a folder; gives a data set with a length whose rows are blocks of the token stream, of any length. No block is
stored: block N of T tokens is the tokens from N x T on, wherever the shards and the documents end. The rows are those
of `tokenize`, bit for bit. `PreparedDocuments` gives the same documents shard by shard, for streams.

Shape suffixes: T tokens per block, N tokens of a shard, D documents of a shard.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.data_errors import DataError, DataFileError
from forgather.ml.data.file_content import file_stamp, sampled_digest
from forgather.ml.data.packing import IGNORED, ROW_COLUMNS, document_positions
from forgather.ml.data.prepared_manifest import Manifest, Shard, damaged, damaged_shards, other_tokenizer, read_manifest
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

COLUMN = "input_ids"


def prepared(
    folder: str | os.PathLike[str],
    block_size: int = 256,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    document_boundaries: bool = True,
    verify: bool = False,
) -> PreparedRows:
    """Returns packed blocks of tokens that `fgcli data prepare` wrote, as `tokenize` would make them of the texts.

    Args:
        folder: the folder that was prepared.
        block_size: the number of tokens per block. It need not be known when the data is prepared.
        tokenizer: the tokenizer of the run, which must be the one with which the data was prepared; None for no
            comparison.
        document_boundaries: False to omit `position_ids` and keep all labels equal to the inputs, as in `tokenize`.
        verify: whether all shards are read now and compared with their digests, as `fgcli data verify` does.

    Shapes:
        Each row has `input_ids`, `labels` and `position_ids` of shape (T,).

    Raises:
        DataFileError: FG779, FG780, FG781 from `read_manifest`; FG782 if a shard has changed.
        DataError: FG783 if the tokenizer is another one; FG836 if the tokens do not fill one block.
    """
    refuse_wrong_values("data:prepared", locals())
    place = Path(folder).expanduser()
    manifest = read_manifest(place)
    if tokenizer is not None and tokenizer_digest(tokenizer) != manifest.tokenizer:
        raise other_tokenizer(place)
    if verify and (wrong := next(damaged_shards(place, manifest), None)):
        raise damaged(place, wrong)
    blocks, tail = divmod(manifest.num_tokens, block_size)
    if not blocks:
        raise DataError(
            f"the prepared text gives {plural(manifest.num_tokens, 'token')}, less than one block of {block_size}",
            code="FG836",
            hint="more text, or a smaller block_size",
            found=manifest.num_tokens,
        ).about("block_size")
    logger.info(
        "%d documents, %d tokens: %d blocks, %d tokens left over",
        *(manifest.num_documents, manifest.num_tokens, blocks, tail),
    )
    return PreparedRows(place, manifest, block_size, ROW_COLUMNS if document_boundaries else ROW_COLUMNS[:2])


class _Mapped(NamedTuple):
    """The memory-mapped content of a shard.

    Shapes:
        ids_N: (N,). offsets_D: (D + 1,), the first token of each document, and N.
    """

    ids_N: np.ndarray
    offsets_D: np.ndarray


class _Shards:
    """The shards of a folder, each of which is mapped when it is first read, in the process that reads it."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: str) -> None:
        self._folder, self._shards, self._dtype = folder, shards, dtype
        self._open: dict[int, _Mapped] = {}

    def __getitem__(self, number: int) -> _Mapped:
        if (known := self._open.get(number)) is not None:
            return known
        shard = self._shards[number]
        file = self._folder / shard.file
        try:
            column = pa.ipc.open_file(pa.memory_map(str(file))).get_batch(0).column(COLUMN)
            found = _Mapped(column.values.to_numpy(), column.offsets.to_numpy())
        except (OSError, LookupError, AttributeError, pa.ArrowException) as error:
            raise DataFileError(f"{str(file)!r} cannot be read: {error}", code="FG781") from error
        sizes = (len(found.ids_N), len(found.offsets_D) - 1, str(found.ids_N.dtype))
        if sizes != (shard.tokens, shard.documents, self._dtype):
            raise DataFileError(f"{str(file)!r} holds {sizes}, and the manifest says otherwise", code="FG781")
        self._open[number] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the files itself: a copy of the mapping would be a copy of the tokens.
        return self.__dict__ | {"_open": {}}


class PreparedRows(Dataset[Any]):
    """Blocks of equal length of a token stream, which are cut out of memory-mapped shards when they are read.

    Args:
        folder: the folder of the shards.
        manifest: its manifest.
        block_size: the number of tokens per block.
        columns: the names of the columns.

    Attributes:
        column_names: the names of the columns.
        block_size: the number of tokens of each row.
        largest_id: the largest token id of all rows.
    """

    def __init__(self, folder: Path, manifest: Manifest, block_size: int, columns: Sequence[str]) -> None:
        self.folder, self.block_size, self.largest_id = folder, block_size, manifest.largest_id
        self.column_names = list(columns)
        # Positions of documents are not stored: without their column, the labels must not know them, either.
        self._has_boundaries = "position_ids" in columns
        filled = [shard for shard in manifest.shards if shard.tokens]
        self._ends = list(accumulate(shard.tokens for shard in filled))
        self._shards = _Shards(folder, filled, manifest.dtype)

    def __len__(self) -> int:
        return self._ends[-1] // self.block_size

    def __getitem__(self, key: int | slice) -> dict[str, Any]:
        if isinstance(key, slice):
            rows = [self[number] for number in range(*key.indices(len(self)))]
            return {name: [row[name] for row in rows] for name in self.column_names}
        number = key + len(self) if key < 0 else key
        if not 0 <= number < len(self):
            raise IndexError(f"row {key} of {len(self)}")
        ids_T, starts_T = self._tokens(number * self.block_size)
        row = {"input_ids": ids_T, "labels": ids_T}
        if self._has_boundaries:
            positions_T = document_positions(starts_T[None])[0]
            row["labels"] = np.where(positions_T == 0, IGNORED, ids_T)
            row["position_ids"] = positions_T.astype(np.int64)
        return {name: torch.from_numpy(row[name].copy()) for name in self.column_names}

    def select_columns(self, names: Sequence[str]) -> PreparedRows:
        """Returns the same rows with some of their columns.

        Args:
            names: the names of the columns.
        """
        chosen = copy.copy(self)
        chosen.column_names = [name for name in self.column_names if name in names]
        return chosen

    def _tokens(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids from a position of the stream on, and a mask of the first tokens of documents.

        Shapes:
            Returns (T,) and (T,).
        """
        ids_T = np.empty(self.block_size, dtype=np.int64)
        starts_T = np.zeros(self.block_size, dtype=bool)
        done, number = 0, bisect_right(self._ends, first)
        while done < self.block_size:
            shard = self._shards[number]
            begin = first + done - (self._ends[number - 1] if number else 0)
            end = min(begin + self.block_size - done, len(shard.ids_N))
            ids_T[done : done + end - begin] = shard.ids_N[begin:end]
            low, high = np.searchsorted(shard.offsets_D, (begin, end))
            starts_T[shard.offsets_D[low:high] - begin + done] = True
            done, number = done + end - begin, number + 1
        return ids_T, starts_T


class PreparedDocuments:
    """The documents of a prepared folder, shard by shard, as `ml.data.shards.ShardedRows` describes.

    Each row is a document with its end-of-text token, in the column `input_ids`.

    Args:
        folder: the folder that was prepared.

    Raises:
        DataFileError: FG779, FG780, FG781 from `read_manifest`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).expanduser()
        self._manifest = read_manifest(self._folder)
        self._shards = _Shards(self._folder, self._manifest.shards, self._manifest.dtype)

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._manifest.shards)

    def shard_size(self, shard: int) -> int:
        """Returns the number of tokens of a shard."""
        return self._manifest.shards[shard].tokens

    def shard_name(self, shard: int) -> str:
        """Returns the name of a shard for messages."""
        return self._manifest.shards[shard].file

    def content_digest(self, shard: int) -> str:
        """Returns the digest of a shard, and samples of what its file holds now."""
        file = self._manifest.shards[shard].file
        return f"{self._manifest.shards[shard].xxh3} {sampled_digest(str(self._folder / file))}"

    def shard_stamp(self, shard: int) -> str:
        """Returns a text that changes when the file of a shard is written again."""
        return file_stamp(str(self._folder / self._manifest.shards[shard].file))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for shard in range(self.num_shards):
            yield from self.open(shard)

    def open(self, shard: int, offset: Any = None) -> DocumentReader:
        """Returns the documents of a shard from an offset on, without reading those before it.

        Args:
            shard: the number of the shard, from 0.
            offset: the number of documents to skip; None for none.
        """
        return DocumentReader(self._shards[shard], offset or 0)


class DocumentReader:
    """An iterator over the documents of a shard.

    Args:
        shard: the content of the shard.
        offset: the number of the first document.
    """

    def __init__(self, shard: _Mapped, offset: int) -> None:
        self._shard, self.offset = shard, offset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        offsets_D = self._shard.offsets_D
        if self.offset + 1 >= len(offsets_D):
            raise StopIteration
        ids_N = self._shard.ids_N[offsets_D[self.offset] : offsets_D[self.offset + 1]]
        self.offset += 1
        return {COLUMN: ids_N.astype(np.int32)}
