"""What scripts of the tests give to `forgather.distributed`: a model that a config can name, rows, functions."""

import hashlib
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_llama(layers=2, vocab_size=32):
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{**SIZES, "num_hidden_layers": layers}))


def token_rows(count=16, length=8):
    drawn = torch.randint(32, (count, length), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in drawn]


class Classifier(torch.nn.Module):
    """A module that returns logits alone, so that the script gives the loss."""

    def __init__(self, width=6, classes=3):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layers(x))


def numbers(count=24, width=6, classes=3):
    made = torch.Generator().manual_seed(5)
    x = torch.randn(count, width, generator=made)
    return torch.utils.data.TensorDataset(x, torch.arange(count) % classes)


def write_step(engine, step, path):
    Path(path).write_text(json.dumps({"step": step, "weights": len(list(engine.parameters()))}))


def result_of(trainer, folder):
    """Returns what a run left: its losses, the digest of its weights, and the names of its checkpoints."""
    folder = Path(folder)
    model = folder / "model.safetensors"
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "weights": hashlib.sha256(model.read_bytes()).hexdigest(),
        "checkpoints": sorted(entry.name for entry in folder.glob("checkpoint-*")),
    }
