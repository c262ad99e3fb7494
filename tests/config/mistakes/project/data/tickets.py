"""The tickets: files of JSON lines, one folder a language."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset

LANGUAGES = ("en", "de")


def load_tickets(
    folder: str,
    languages: list[str],
    *,
    min_chars: int = 0,
    shuffle: bool = False,
    keep: float = 1.0,
    clean: Callable[[list[str]], list[str]] | None = None,
) -> Dataset:
    """Returns the tickets of some languages as rows with the column "text"."""
    texts = [
        json.loads(line)["text"]
        for language in languages
        for file in sorted(Path(folder, language).glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    texts = [text for text in (clean(texts) if clean else texts) if len(text) >= min_chars]
    rows = Dataset.from_dict({"text": texts[: round(keep * len(texts))]})
    return rows.shuffle(seed=0) if shuffle else rows


def without_duplicates(dataset: Dataset, column: str = "text") -> Dataset:
    """Returns the rows whose text occurs for the first time."""
    first = {text: number for number, text in reversed(list(enumerate(dataset[column])))}
    return dataset.select(sorted(first.values()))
