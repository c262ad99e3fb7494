"""Data sets for language models: reading, splitting, tokenizing, packing and padding.

Each public name imports its module when the name is first used, so `forgather.ml.data:tokenize` imports only the
libraries that tokenization needs. No submodule has the name of a function of this package, which it would shadow.
"""

from __future__ import annotations

from typing import Any

_LAZY = {
    "DataError": "data_errors",
    "DataFileError": "data_errors",
    "python_sources": "sources",
    "text_files": "sources",
    "json_lines": "sources",
    "csv_files": "sources",
    "parquet": "sources",
    "hub_dataset": "sources",
    "labelled_rows": "labelled",
    "class_names": "file_rows",
    "tokenize_labelled": "labelled",
    "tagged_rows": "tagged",
    "tokenize_tagged": "tagged",
    "seq2seq_rows": "seq2seq",
    "tokenize_seq2seq": "seq2seq",
    "image_rows": "images",
    "image_arrays": "images",
    "image_processor": "images",
    "load_image_processor": "images",
    "ImageChanges": "images",
    "ImageDataset": "images",
    "split": "train_eval_split",
    "mix": "mixture",
    "beginnings": "prompts",
    "tokenize": "packing",
    "pack": "packing",
    "prepared": "prepared_rows",
    "PreparedDocuments": "prepared_rows",
    "prepare_tokens": "shard_writer",
    "tokenize_examples": "examples",
    "pack_examples": "example_packing",
    "chats": "conversations",
    "as_chats": "conversations",
    "row_texts": "conversations",
    "tokenize_chats": "chat_tokens",
    "chat_prompts": "chat_tokens",
    "set_chat_template": "chat_template",
    "preference_pairs": "preference_rows",
    "pair_prompts": "preference_rows",
    "rollout_prompts": "rollout_rows",
    "tokenize_preferences": "preferences",
    "tokenize_feedback": "preferences",
    "PreferenceCollator": "preference_collator",
    "PaddingCollator": "padding",
    "CausalLMCollator": "padding",
    "train_bpe": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = list(_LAZY)  # noqa: PLE0604


# PEP 562: `datasets` and `tokenizers` take seconds to import, and not every name needs them.
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
