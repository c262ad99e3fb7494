"""Writes the Python standard library as shards of texts (data/train-*.jsonl), a part for evaluation (data/eval.jsonl).

The configs stream them, as they would stream the shards of a large data set. The same Python writes the same files.

Usage: python make_data.py
"""

import json
from pathlib import Path

from forgather.ml.data import python_sources

SHARDS = 64
HELD_OUT = 8  # one text of so many is for evaluation


def main() -> None:
    """Writes the files."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": row["text"]}) + "\n" for row in python_sources()]
    train = [line for number, line in enumerate(lines) if number % HELD_OUT]
    (folder / "eval.jsonl").write_text("".join(lines[::HELD_OUT]), encoding="utf-8")
    for shard in range(SHARDS):
        (folder / f"train-{shard:02}.jsonl").write_text("".join(train[shard::SHARDS]), encoding="utf-8")
    print(f"{len(train)} texts in {SHARDS} shards of {folder}, and {len(lines[::HELD_OUT])} for evaluation")


if __name__ == "__main__":
    main()
