"""Rows of a source text and a target text, as for translation or summaries, for encoder-decoder models.

`seq2seq_rows` reads JSON lines and CSV files. `tokenize_seq2seq` gives the token ids of the source, which the encoder
reads, and those of the target as labels. The model makes the inputs of its decoder from the labels, and a text can be
generated from the same rows, whose labels are then the reference.

Shapes:
    S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, Value
from transformers import PreTrainedTokenizerBase

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import missing_column
from forgather.ml.data.file_rows import rows_with_columns, stored_rows, text_of, unusable
from forgather.ml.data.packing import encode_rows, read_rows, rows_writer
from forgather.ml.data.sources import Paths
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

_STATS = "stats.json"


def seq2seq_rows(paths: Paths, *, source_column: str | None = None, target_column: str | None = None) -> Dataset:
    """Returns the rows of JSON lines and CSV files, each with a source text and a target text.

    Args:
        paths: a file, a folder (whose `.jsonl`, `.json` and `.csv` files are read), a glob, or a list of these.
        source_column: the name of the column with the text that the model reads; None for a usual name.
        target_column: the name of the column with the text that it learns to write; None for a usual name.

    Returns:
        A data set with the columns `source` and `target`.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line cannot be read.
        DataError: FG831 if a column is missing, FG975 if several could be meant; FG832 if there are no rows; FG877 if a
            row lacks one of the texts.
    """
    rows = rows_with_columns(paths, {"source_column": source_column, "target_column": target_column})
    sources = [text_of(row, row.values["source_column"], "source") for row in rows]
    targets = [text_of(row, row.values["target_column"], "target") for row in rows]
    columns = {"source": sources, "target": targets}
    return stored_rows("seq2seq", columns, {"source": Value("string"), "target": Value("string")})


def tokenize_seq2seq(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int = 256,
    max_target_length: int = 128,
    source_prefix: str = "",
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns the token ids of each source, and those of its target as labels, which end with the end-of-text token.

    The special tokens of the tokenizer are added to both. A text that is longer than its limit is cut before they are
    added; the numbers of such texts are logged.

    Args:
        dataset: the rows that `seq2seq_rows` returned. The splits of a `DatasetDict` are tokenized separately.
        tokenizer: a tokenizer with a padding token and an end-of-text token.
        max_source_length: the maximum length of a source in tokens.
        max_target_length: the maximum length of a target in tokens.
        source_prefix: a text before each source, such as "translate English to German: " for T5.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Shapes:
        `input_ids`: (S,). `labels`: (T,).

    Raises:
        DataError: FG831 if a column is missing; FG878 if the tokenizer lacks one of the tokens, or if a length is
            below 2.
    """
    refuse_wrong_values("data:tokenize_seq2seq", locals())
    lengths = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    settings: dict[str, Any] = {**lengths, "source_prefix": source_prefix}
    if isinstance(dataset, DatasetDict):
        settings |= {"num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict({name: tokenize_seq2seq(part, tokenizer, **settings) for name, part in dataset.items()})
    _check_arguments(dataset, tokenizer)
    key = content_key(format=3, rows=dataset._fingerprint, tokenizer=tokenizer_digest(tokenizer), **settings)

    def build(folder: Path) -> None:
        """Writes the token ids and labels of all rows into a folder of the cache, and counts what was cut."""
        stats = {"rows": len(dataset), "sources": 0, "targets": 0}
        schema = pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "labels")})
        encode = partial(_encode, tokenizer, max_source_length, max_target_length, source_prefix)
        with rows_writer(folder, schema) as writer:
            for batch in encode_rows(dataset, encode, num_proc):
                stats["sources"] += sum(is_cut for *_, (is_cut, _) in batch)
                stats["targets"] += sum(is_cut for *_, (_, is_cut) in batch)
                columns = {"input_ids": [ids for ids, *_ in batch], "labels": [labels for _, labels, _ in batch]}
                writer.write_batch(pa.record_batch(columns, schema=schema))
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("seq2seq", key, build, cache_dir)
    _report(json.loads((folder / _STATS).read_text(encoding="utf-8")), max_source_length, max_target_length)
    return read_rows(folder, key)


def _report(stats: dict[str, int], max_source: int, max_target: int) -> None:
    report = logger.warning if stats["sources"] or stats["targets"] else logger.info
    rows, sources, targets = (plural(stats[f"{name}s"], name) for name in ("row", "source", "target"))
    report("%s; %s cut to %d tokens, %s to %d", rows, sources, max_source, targets, max_target)


def _check_arguments(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    for column in ("source", "target"):
        if column not in dataset.column_names:
            raise missing_column(column, dataset.column_names, "dataset")
    for name, token in (("padding", tokenizer.pad_token_id), ("end-of-text", tokenizer.eos_token_id)):
        if token is None:
            hint = "take the tokenizer of an encoder-decoder model, or one of train_bpe"
            raise unusable(f"the tokenizer has no {name} token", hint)


def _encode(
    tokenizer: PreTrainedTokenizerBase, max_source: int, max_target: int, prefix: str, batch: dict[str, list[Any]]
) -> dict[str, list[list[list[int]]]]:
    """Returns for each row: the ids of the source, the labels, and which of the two were cut."""
    options = {"padding": False, "return_attention_mask": False, "verbose": False}
    sources = tokenizer([prefix + text for text in batch["source"]], **options)["input_ids"]
    cut = {"truncation": True, "max_length": max_source}
    cut_sources = tokenizer([prefix + text for text in batch["source"]], **cut, **options)["input_ids"]
    targets = tokenizer(text_target=batch["target"], **options)["input_ids"]
    eos = tokenizer.eos_token_id
    # Tokenizers of other models do not add the token at which generation stops; that of mBART adds a language after it.
    # A text of our own shows it: a target of the user may end with that token itself.
    special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    (example,) = tokenizer(text_target=["a"], **options)["input_ids"]
    adds_end = eos in takewhile(special.__contains__, reversed(example))
    room = max_target - (not adds_end)
    cut_targets = tokenizer(text_target=batch["target"], truncation=True, max_length=room, **options)["input_ids"]
    rows = []
    for whole_source, source, whole, target in zip(sources, cut_sources, targets, cut_targets, strict=True):
        is_cut = [int(len(source) < len(whole_source)), int(len(target) < len(whole))]
        rows.append([source, target if adds_end or target[-1:] == [eos] else [*target, eos], is_cut])
    # `encode_rows` expects one list per row.
    return {"input_ids": rows}
