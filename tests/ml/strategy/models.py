"""Tiny models of double precision, and packed batches of uneven numbers of targets, for comparing strategies."""

import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig

from forgather.ml.models import from_config

VOCAB = 64


def llama(*, seed=3, layers=2, dtype="float64", **changes):
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"num_hidden_layers": layers, "vocab_size": VOCAB, "max_position_embeddings": 64, **changes}
    return from_config(LlamaConfig(**settings), seed=seed, dtype=dtype)


def gpt2(*, seed=3, layers=2, dtype="float64", **changes):
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    settings = {"n_embd": 32, "n_layer": layers, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, **quiet}
    return from_config(GPT2Config(**settings | changes), seed=seed, dtype=dtype)


class Plain(nn.Module):
    """A model that draws from the global random numbers, ties a weight and keeps a tensor as an attribute."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.scale = torch.full((), 2.0)

    def forward(self, ids):
        hidden = self.embedding(ids) + self.table
        for layer in self.layers:
            hidden = layer(hidden) * self.scale
        return self.head(hidden)


def batches(count, *, rows=4, length=12, seed=0):
    """Returns batches with positions of two packed documents, and labels of which a changing part is ignored."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            ignored = int(torch.randint(0, length - 2, (), generator=generator))
            labels[row, :ignored] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def rows_of(batch, rank, size):
    """Returns the slice of a global batch that a data-parallel rank reads."""
    share = next(iter(batch.values())).shape[0] // size
    return {name: value[rank * share : (rank + 1) * share] for name, value in batch.items()}


def whole(weights):
    """Returns the model of initial weights, filled on the CPU."""
    model = weights.on_meta()
    weights.fill(model, device="cpu")
    return model
