"""Packing: tokenizes documents and cuts the token stream into blocks of equal length.

The inputs are rows of text and a tokenizer; the output is a data set of `input_ids`, `labels` and `position_ids`, in
which each row is exactly `block_size` tokens long. The concatenation of all blocks and the tail is the token stream of
all documents in order, each followed by the end-of-text token. The tail (the tokens at the end that do not fill a
block) is dropped, and its length is logged. Results are cached by content.

`position_ids` restart at 0 at the start of each document and of each block: the part of a document after a block
border is treated as a separate document. The label of the token at position 0 is -100, because no earlier token of the
row belongs to the same document.

Shape suffixes: B blocks, T tokens per block, N tokens of a stream.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import PreTrainedTokenizerBase

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.block_packer import BlockPacker
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import (
    DataError,
    missing_column,
    no_text,
    refuse_no_text,
    unread_column_warning,
)
from forgather.ml.data.progress_bar import show_progress
from forgather.ml.data.row_stream import Row, RowStream, groups, refuse_stored, stream_of
from forgather.ml.data.shards import Packer
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

_ROWS, _STATS = "rows.arrow", "stats.json"
_FORMAT = 2  # raised when the meaning of a cached folder changes
_FORMAT_WITHOUT_BOUNDARIES = 1
_BATCH_ROWS = 256
IGNORED = -100
ROW_COLUMNS = ("input_ids", "labels", "position_ids")


class Packed(NamedTuple):
    """Complete blocks of a token stream, and the tokens that are carried over to the next blocks.

    Args:
        ids_BT: the token ids of the blocks.
        starts_BT: a mask that is True at the first token of each document.
        tail_N: the token ids after the last block, which do not fill a block.

    Shapes:
        ids_BT, starts_BT: (B, T). tail_N: (N,) with N < T.
    """

    ids_BT: np.ndarray
    starts_BT: np.ndarray
    tail_N: np.ndarray


def tokenize(
    dataset: Dataset | DatasetDict | RowStream | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int = 256,
    text_column: str = "text",
    *,
    document_boundaries: bool = True,
    make_packer: Callable[[], Packer] | None = None,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict | RowStream:
    """Returns packed blocks: documents joined with the end-of-text token and cut into rows of `block_size` tokens.

    `position_ids` restart at each document, so that models can mask attention across documents. The labels equal the
    inputs, except that the first token of each document has the label -100. The model shifts the labels. The tokens at
    the end that do not fill a block are dropped, and their number is logged.

    Args:
        dataset: the rows of text. The splits of a `DatasetDict` are packed separately. Streamed rows, also those of a
            `datasets.IterableDataset`, give a stream; the last block of each virtual stream is filled with padding.
        tokenizer: a tokenizer with an end-of-text token.
        block_size: the number of tokens per block.
        text_column: the name of the column with the text.
        document_boundaries: False to omit `position_ids` and keep all labels equal to the inputs. A token then attends
            to all earlier tokens of the row, including those of other documents.
        make_packer: a function that returns a packer of your own (`forgather.ml.data.shards:Packer`) for each stream.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process, in which a fast
            tokenizer uses all cores.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Shapes:
        Each row has `input_ids`, `labels` and `position_ids` of shape (T,), memory-mapped from disk.

    Raises:
        DataError: FG831, FG837 or FG839 from `check_inputs`, FG833 if the column holds no text, FG836 if the text does
            not fill one block, FG982 if an argument is for streamed or for stored rows only.
    """
    refuse_wrong_values("data:tokenize", locals())
    if isinstance(dataset, RowStream | IterableDataset):
        stream = _streamed(dataset, tokenizer, text_column, num_proc=num_proc, cache_dir=cache_dir)
        blocks = partial(BlockPacker, block_size, tokenizer.eos_token_id, document_boundaries=document_boundaries)
        return stream.packed(make_packer or blocks, ROW_COLUMNS[: 3 if document_boundaries else 2])
    _refuse_packer(make_packer)
    if isinstance(dataset, DatasetDict):
        options: dict[str, Any] = {"text_column": text_column, "document_boundaries": document_boundaries}
        options |= {"num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict({name: tokenize(part, tokenizer, block_size, **options) for name, part in dataset.items()})
    check_inputs(dataset, tokenizer, {"text_column": text_column})
    refuse_no_text(dataset, text_column)
    return _stored_blocks(dataset, tokenizer, block_size, text_column, document_boundaries, num_proc, cache_dir)


def _stored_blocks(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    text_column: str,
    document_boundaries: bool,
    num_proc: int | None,
    cache_dir: str | os.PathLike[str] | None,
) -> Dataset:
    """Returns the blocks from the cache, after they were made if they are not there."""
    # The older format number is kept for rows without boundaries, whose content has not changed since.
    key = content_key(
        format=_FORMAT if document_boundaries else _FORMAT_WITHOUT_BOUNDARIES,
        rows=dataset._fingerprint,
        text_column=text_column,
        tokenizer=tokenizer_digest(tokenizer),
        block_size=block_size,
    )

    def build(folder: Path) -> None:
        documents = encode_rows(dataset, partial(encode_texts, tokenizer, text_column), num_proc)
        stats = _write_blocks(folder, documents, block_size, tokenizer.eos_token_id, document_boundaries)
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("tokens", key, build, cache_dir)
    stats = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    logger.info(
        "%(num_documents)d documents, %(num_tokens)d tokens: %(num_blocks)d blocks, %(tail_tokens)d tokens left over",
        stats,
    )
    return read_rows(folder, key).with_format("torch")


def _refuse_packer(make_packer: Callable[[], Packer] | None) -> None:
    if make_packer is not None:
        hint = "set streaming: true where the rows are read, or remove the argument"
        what = "make_packer is for streamed rows, and these are stored"
        raise DataError(what, code="FG982", hint=hint).about("make_packer")


def _streamed(
    dataset: RowStream | IterableDataset, tokenizer: PreTrainedTokenizerBase, text_column: str, **stored: Any
) -> RowStream:
    """Returns the stream of the tokens of texts, each followed by the end-of-text token."""
    stream = stream_of(dataset)
    if stream is None:
        raise DataError(
            f"the rows of {type(dataset).__name__} are read as a whole and cannot be packed",
            code="FG982",
            hint="read them with json_lines, parquet or text_files and streaming: true",
        ).about("dataset")
    refuse_stored(stream, **stored)
    # A data set of `datasets` may not know its columns before it is read.
    if stream.column_names:
        check_inputs(stream, tokenizer, {"text_column": text_column})
    return stream.prepared(partial(_document_tokens, tokenizer, text_column), ("input_ids",))


def _document_tokens(tokenizer: PreTrainedTokenizerBase, text_column: str, rows: Iterator[Row]) -> Iterator[Row]:
    for group in groups(rows, _BATCH_ROWS):
        if text_column not in group[0]:
            raise missing_column(text_column, list(group[0]), "text_column")
        texts = {text_column: [row[text_column] for row in group]}
        for ids in encode_texts(tokenizer, text_column, texts)["input_ids"]:
            yield {"input_ids": [*ids, tokenizer.eos_token_id]}


def pack(documents: Iterable[Sequence[Sequence[int]]], block_size: int, eos_token_id: int) -> Iterator[Packed]:
    """Yields the complete blocks of each batch of documents; an incomplete block is carried over to the next batch.

    Args:
        documents: the batches of documents. Each document is a sequence of token ids.
        block_size: the number of tokens per block.
        eos_token_id: the id of the end-of-text token, which is appended to every document.

    Shapes:
        Yields (B, T) blocks and an (N,) tail. B differs from batch to batch and can be 0.
    """
    refuse_wrong_values("data:pack", locals())
    ids_N, starts_N = np.empty(0, dtype=np.int32), np.empty(0, dtype=bool)
    for batch in documents:
        lengths = np.fromiter((len(ids) + 1 for ids in batch), dtype=np.int64, count=len(batch))
        # `fromiter` fills the array directly; a list of Python ints would need several times the memory.
        new_N = np.fromiter(chain.from_iterable((*ids, eos_token_id) for ids in batch), np.int32, lengths.sum())
        begins_N = np.zeros(len(new_N), dtype=bool)
        begins_N[lengths.cumsum() - lengths] = True
        # The tail of the batch before comes first, so that no token is lost between batches.
        ids_N, starts_N = np.concatenate([ids_N, new_N]), np.concatenate([starts_N, begins_N])
        used = len(ids_N) - len(ids_N) % block_size
        blocks = ids_N[:used].reshape(-1, block_size), starts_N[:used].reshape(-1, block_size)
        ids_N, starts_N = ids_N[used:], starts_N[used:]
        yield Packed(*blocks, ids_N)


def document_positions(starts_BT: np.ndarray) -> np.ndarray:
    """Returns the position of each token within its document, or within the document's part that is in the block.

    Shapes:
        starts_BT: (B, T). Returns (B, T), int32.

    Example:
        >>> document_positions(np.array([[False, False, True, False], [True, True, False, False]])).tolist()
        [[0, 1, 0, 1], [0, 0, 1, 2]]
    """
    columns_T = np.arange(starts_BT.shape[1], dtype=np.int32)
    # Column 0 counts as a start even where a document continues from the block before.
    return columns_T - np.maximum.accumulate(np.where(starts_BT, columns_T, 0), axis=1, dtype=np.int32)


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, column: str, batch: dict[str, list[Any]]
) -> dict[str, list[list[int]]]:
    """Returns {"input_ids": the token ids of each text}, without special tokens and without truncation.

    Args:
        tokenizer: a tokenizer of transformers.
        column: the name of the column with the text.
        batch: the values of the rows, by column. A text that is None is treated as an empty text.

    Raises:
        DataError: FG833 if a value is neither a text nor None.
    """
    texts = []
    for text in batch[column]:
        if text is not None and not isinstance(text, str):
            raise no_text(column, type(text).__name__)
        # A missing text is an empty document, so that the number of rows stays right.
        texts.append(text or "")
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    return {"input_ids": tokenizer(texts, add_special_tokens=False, **options)["input_ids"]}


def encode_rows(
    dataset: Dataset, encode: Callable[[dict[str, list[Any]]], dict[str, list[Any]]], num_proc: int | None
) -> Iterator[list[Any]]:
    """Yields batches of `encode(rows)["input_ids"]` in the order of the rows, with a progress bar.

    Args:
        dataset: the rows to tokenize.
        encode: a function that maps a batch of rows to a dict of columns; it must be picklable if `num_proc` is above
            1.
        num_proc: the number of processes that call `encode`, or None to use only the current process.
    """
    if num_proc and num_proc > 1:
        # Without the cache of `datasets`: the result is cached by content in our own format.
        options = {"remove_columns": dataset.column_names, "load_from_cache_file": False}
        mapped = dataset.map(encode, batched=True, num_proc=num_proc, **options)
        batches = (batch["input_ids"] for batch in mapped.iter(batch_size=_BATCH_ROWS))
    else:
        batches = (encode(batch)["input_ids"] for batch in dataset.iter(batch_size=_BATCH_ROWS))
    return show_progress(batches, total=len(dataset), what="tokenizing", logger=logger)


def read_rows(folder: Path, fingerprint: str) -> Dataset:
    """Returns the rows of a cached folder, memory-mapped from disk.

    Args:
        folder: the folder that `cached_folder` returned.
        fingerprint: the fingerprint of the returned data set, which `datasets` would otherwise derive from the path.
    """
    rows = Dataset.from_file(str(folder / _ROWS))
    return Dataset(rows.data, fingerprint=fingerprint)


def rows_writer(folder: Path, schema: pa.Schema) -> pa.RecordBatchStreamWriter:
    """Returns an open Arrow writer for the rows of a cached folder.

    Args:
        folder: the folder that is being built.
        schema: the Arrow schema of the rows.
    """
    return pa.ipc.new_stream(str(folder / _ROWS), schema)


def _columns(packed: Packed, document_boundaries: bool) -> dict[str, np.ndarray]:
    if not document_boundaries:
        return {"input_ids": packed.ids_BT, "labels": packed.ids_BT}
    positions_BT = document_positions(packed.starts_BT)
    # The first token of a document would otherwise be predicted from the end of the document before.
    labels_BT = np.where(positions_BT == 0, np.int32(IGNORED), packed.ids_BT)
    return {"input_ids": packed.ids_BT, "labels": labels_BT, "position_ids": positions_BT}


def _write_blocks(
    folder: Path, documents: Iterable[list[Any]], block_size: int, eos_token_id: int, document_boundaries: bool
) -> dict[str, int]:
    # int32 halves the size on disk; ids are widened to int64 when they are read.
    kind = pa.list_(pa.int32(), block_size)
    schema = pa.schema(dict.fromkeys(ROW_COLUMNS[: 3 if document_boundaries else 2], kind))
    counts = {"num_documents": 0, "num_tokens": 0, "num_blocks": 0, "tail_tokens": 0}

    def counted() -> Iterator[list[Any]]:
        for batch in documents:
            counts["num_documents"] += len(batch)
            yield batch

    with rows_writer(folder, schema) as writer:
        for packed in pack(counted(), block_size, eos_token_id):
            columns = [pa.array(column.reshape(-1)) for column in _columns(packed, document_boundaries).values()]
            # Fixed-size lists store no offsets, and are read as one (B, T) array.
            fixed = [pa.FixedSizeListArray.from_arrays(column, block_size) for column in columns]
            writer.write_batch(pa.record_batch(fixed, schema=schema))
            counts["num_blocks"] += len(packed.ids_BT)
            # Overwritten for each batch: only the tail of the last one is left over.
            counts["tail_tokens"] = len(packed.tail_N)
    counts["num_tokens"] = counts["num_blocks"] * block_size + counts["tail_tokens"]
    if not counts["num_blocks"]:
        raise DataError(
            f"the text gives {plural(counts['num_tokens'], 'token')}, less than one block of {block_size}",
            code="FG836",
            hint="more text, or a smaller block_size",
            found=counts["num_tokens"],
        ).about("block_size")
    return counts


def check_inputs(
    dataset: Dataset | RowStream, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, str | None]
) -> None:
    """Raises an error if a data set or a tokenizer is not suitable for tokenization.

    Args:
        dataset: the rows to tokenize.
        tokenizer: the tokenizer, which needs an end-of-text token.
        columns: the column names by the argument in which they were given. The value None means no column.

    Raises:
        DataError: FG831 if a column is missing, FG837 if the tokenizer has no end-of-text token.
    """
    for argument, column in columns.items():
        if column is not None and column not in dataset.column_names:
            raise missing_column(column, dataset.column_names, argument)
    named = [column for column in columns.values() if column is not None]
    if len(named) == 1 and (warning := unread_column_warning(named[0], dataset.column_names)):
        logger.warning("%s", warning)
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-text token to end documents with",
            code="FG837",
            hint="set tokenizer.eos_token, or use another tokenizer",
        )
