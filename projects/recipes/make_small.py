"""Makes small stand-ins for what the QLoRA recipe names: a Llama of 0.2 M parameters, and rows in the form of Alpaca.

models/tiny_llama has random weights and a tokenizer; the files in datasets have the names and the keys of the recipe's
files. The same command writes the same files.

Usage: python make_small.py [ROWS]
"""

import json
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from forgather.ml.data.tokenizer import train_bpe

PROJECT = Path(__file__).parent
WORDS = "zero one two three four five six seven eight nine ten".split()


def alpaca_rows(count, seed):
    """Returns rows with `instruction`, `input` and `output`, as Alpaca has them."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        first, second = dice.randint(0, 5), dice.randint(0, 5)
        found.append(
            {
                "instruction": "Add the two numbers.",
                "input": f"{WORDS[first]} and {WORDS[second]}",
                "output": WORDS[first + second],
            }
        )
    return found


def write(folder, count=256):
    """Writes model, tokenizer and rows into a project."""
    data = Path(folder) / "datasets"
    data.mkdir(exist_ok=True)
    rows = {"alpaca_cleaned": alpaca_rows(count, 1), "alpaca_cleaned_eval": alpaca_rows(max(count // 8, 4), 2)}
    for name, found in rows.items():
        lines = [json.dumps(row) + "\n" for row in found]
        (data / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = Dataset.from_dict({"text": [" ".join(row.values()) for row in rows["alpaca_cleaned"]]})
    tokenizer = train_bpe(texts, vocab_size=512)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(Path(folder) / "models" / "tiny_llama")


if __name__ == "__main__":
    write(PROJECT, *map(int, sys.argv[1:]))
