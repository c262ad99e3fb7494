"""Tiny models of double precision of every family whose rows may be divided by positions, and rows of every kind."""

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from forgather.ml.models import from_config

VOCAB, LENGTH = 32, 12
_SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"vocab_size": VOCAB, "max_position_embeddings": LENGTH}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_WINDOWS = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
_WITHOUT_WINDOWS = {
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES = {
    "gemma": lambda: GemmaConfig(**_GROUPED),
    "gemma2": lambda: Gemma2Config(**_GROUPED, **_WINDOWS),
    "gemma3": lambda: Gemma3TextConfig(**_GROUPED, **_WINDOWS),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=LENGTH, **_QUIET),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES, rotary_pct=0.5),
    "llama": lambda: LlamaConfig(**_GROUPED),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=4),
    "olmo2": lambda: Olmo2Config(**{**_GROUPED, **_TOKENS}),
    "phi3": lambda: Phi3Config(**{**_SIZES, **_TOKENS}, num_key_value_heads=2, sliding_window=4),
    "qwen2": lambda: Qwen2Config(**_SIZES, num_key_value_heads=2, use_sliding_window=True, **_WINDOWS),
    "qwen3": lambda: Qwen3Config(**_GROUPED, use_sliding_window=True, **_WINDOWS),
}


def model_of(family, attention="sdpa"):
    # Eager attention computes its softmax in float32 whatever the type of the model.
    dtype = "float32" if attention == "eager" else "float64"
    return from_config(FAMILIES[family](), seed=3, dtype=dtype, attn_implementation=attention)


def causal_model_of(family, dtype="float64", **settings):
    """Returns the model of a family without sliding windows, whose attention a ring computes."""
    config = FAMILIES[family]()
    for name, value in {**_WITHOUT_WINDOWS, **settings}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return from_config(config, seed=3, dtype=dtype, attn_implementation="sdpa")


def rows_of_kind(kind, seed=5):
    """Returns two rows: "whole", "uneven" (11 positions), "packed", "uneven packed", "padded" or "padded first"."""
    generator = torch.Generator().manual_seed(seed)
    length = LENGTH - 1 if kind.startswith("uneven") else LENGTH
    ids = torch.randint(0, VOCAB, (2, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][0, :5] = -100
    if kind.endswith("packed"):
        ends = ((5,), (2, 9))
        batch["position_ids"] = torch.stack([_positions(length, *each) for each in ends])
        for row, each in enumerate(ends):
            batch["labels"][row, list(each)] = -100
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, 7:] = 0
        batch["labels"][0, 7:] = -100
    if kind == "padded first":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, :7] = 0
        batch["labels"][0, :7] = -100
    return batch


def _positions(length, *starts):
    bounds = [0, *starts, length]
    return torch.cat([torch.arange(end - begin) for begin, end in zip(bounds, bounds[1:], strict=False)])
