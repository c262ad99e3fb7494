"""Tokenization of prompt and completion pairs, one row per example, for instruction data.

The inputs are rows of text and a tokenizer; the output is rows with `input_ids`, `attention_mask` and `labels`. The
rows differ in length, and `CausalLMCollator` pads them. The loss is computed only on the completion and the end-of-text
token after it. The numbers of truncated examples and of dropped examples (no completion left) are logged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.example_packing import pack_examples
from forgather.ml.data.packing import check_inputs, encode_rows, encode_texts, read_rows, rows_writer
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger

logger = get_logger(__name__)

IGNORE_INDEX = -100
_STATS = "stats.json"
_COLUMNS = ("input_ids", "attention_mask", "labels")


def tokenize_examples(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 512,
    *,
    completion_column: str = "text",
    prompt_column: str | None = None,
    packing: bool = False,
    num_proc: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset | DatasetDict:
    """Returns a data set with one tokenized example per row: prompt, completion and end-of-text token.

    Args:
        dataset: the rows of text. The splits of a `DatasetDict` are tokenized separately.
        tokenizer: a tokenizer with an end-of-text token.
        max_length: the maximum length of an example in tokens. Longer examples are truncated at the end.
        completion_column: the name of the column with the text on which the loss is computed.
        prompt_column: the name of the column with the text before the completion, on which no loss is computed, or None
            for examples without a prompt.
        packing: whether to join whole examples into rows of at most `max_length` tokens, with `pack_examples`.
        num_proc: the number of processes that tokenize, or None to tokenize in the current process.
        cache_dir: the root of the cache, or None for the user's cache folder.

    Raises:
        DataError: FG831 if a column is missing, FG836 if no example is left, FG837 if the tokenizer has no end-of-text
            token, FG839 if `max_length` is below 2.
    """
    refuse_wrong_values("data:tokenize_examples", locals())
    options: dict[str, Any] = {"completion_column": completion_column, "prompt_column": prompt_column}
    if isinstance(dataset, DatasetDict):
        options |= {"packing": packing, "num_proc": num_proc, "cache_dir": cache_dir}
        return DatasetDict(
            {name: tokenize_examples(part, tokenizer, max_length, **options) for name, part in dataset.items()}
        )
    named = {"prompt_column": prompt_column, "completion_column": completion_column}
    check_inputs(dataset, tokenizer, named)
    columns = [column for column in named.values() if column is not None]
    # Everything that decides the content is part of the key; `num_proc` is not.
    facts = {"rows": dataset._fingerprint, "tokenizer": tokenizer_digest(tokenizer), "max_length": max_length}
    key = content_key(format=1, **facts, **options)

    def build(folder: Path) -> None:
        batches = encode_rows(dataset, partial(_encode, tokenizer, columns), num_proc)
        stats = _write_examples(folder, batches, max_length, tokenizer.eos_token_id)
        (folder / _STATS).write_text(json.dumps(stats), encoding="utf-8")

    folder = cached_folder("examples", key, build, cache_dir)
    stats = json.loads((folder / _STATS).read_text(encoding="utf-8"))
    report = logger.warning if stats["num_dropped"] or stats["num_cut"] else logger.info
    report(
        "%(num_examples)d examples; %(num_cut)d cut to %(max_length)d tokens, "
        "%(num_dropped)d left out (no completion left)",
        stats,
    )
    rows = read_rows(folder, key)
    return pack_examples(rows, max_length, cache_dir=cache_dir) if packing else rows


def _encode(
    tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], batch: dict[str, list[Any]]
) -> dict[str, list[list[list[int]]]]:
    parts = [encode_texts(tokenizer, column, batch)["input_ids"] for column in columns]
    # `encode_rows` expects one list per row, so prompt and completion travel as a pair.
    return {"input_ids": [list(texts) for texts in zip(*parts, strict=True)]}


def _write_examples(folder: Path, batches: Any, max_length: int, eos_token_id: int) -> dict[str, int]:
    schema = pa.schema({name: pa.list_(pa.int32()) for name in _COLUMNS})
    stats = {"num_examples": 0, "num_cut": 0, "num_dropped": 0, "max_length": max_length}
    with rows_writer(folder, schema) as writer:
        for batch in batches:
            rows: dict[str, list[list[int]]] = {name: [] for name in _COLUMNS}
            # The prompt is optional: `prompt` is an empty list or a list with one element.
            for *prompt, completion in batch:
                prompt_ids = prompt[0] if prompt else []
                # Prompt and completion are tokenized separately: the mask then ends exactly at the border between them.
                full = [*prompt_ids, *completion, eos_token_id]
                # A prompt that fills the row leaves no token with a loss.
                if not completion or len(prompt_ids) >= max_length:
                    stats["num_dropped"] += 1
                    continue
                stats["num_cut"] += len(full) > max_length
                rows["input_ids"].append(full[:max_length])
                rows["attention_mask"].append([1] * min(len(full), max_length))
                rows["labels"].append(([IGNORE_INDEX] * len(prompt_ids) + full[len(prompt_ids) :])[:max_length])
            stats["num_examples"] += len(rows["labels"])
            writer.write_batch(pa.record_batch(rows, schema=schema))
    if not stats["num_examples"]:
        raise DataError(
            "no row gives an example with something to learn",
            code="FG836",
            hint="a larger max_length, or other columns",
        )
    return stats
