"""Tiny models of many kinds, each to be cut into stages."""

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

COMMON = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": 48,
    "n_embd": 16,
    "n_layer": 5,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN = {
    "gpt2": GPT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": GPT | {"rotary_dim": 4},
    "bloom": {"vocab_size": 48, "hidden_size": 16, "n_layer": 5, "n_head": 4, "hidden_dropout": 0.0},
    "opt": COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "gpt_neox": COMMON | {"hidden_dropout": 0.0},
    "phi": COMMON | {"resid_pdrop": 0.0},
    "falcon": {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 4},
    "qwen2": COMMON | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "mistral": COMMON | {"sliding_window": 4},
    "gemma2": COMMON | {"sliding_window": 4},
    "mixtral": COMMON | {"num_local_experts": 3, "experts_implementation": "eager"},
}
TRANSFORMERS = [
    "llama",
    "gpt2",
    "qwen2",
    "qwen3",
    "mistral",
    "gpt_neox",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "opt",
    "bloom",
    "gptj",
    "falcon",
    "mixtral",
    "olmo2",
    "stablelm",
]


def transformer(kind, **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**OWN.get(kind, COMMON), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, states):
        return states + self.inner(states)


class Plain(nn.Module):
    """Ids in, a parameter of its own, activation between blocks, one matrix for both ends."""

    def __init__(self, width=8, depth=4, vocabulary=20):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(1, 32, width))
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        _, length = ids.shape
        states = self.drop(self.words(ids) + self.places[:, :length])
        for block in self.blocks:
            states = torch.tanh(block(states))
        return torch.nn.functional.linear(self.norm(states), self.words.weight)


class Numbers(nn.Module):
    """Numbers in, modules made in another order than they are called."""

    def __init__(self, width=8, depth=4):
        super().__init__()
        self.out = nn.Linear(width, 3)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.into = nn.Linear(5, width)

    def forward(self, values):
        return self.out(self.blocks(self.into(values)))


class Residual(nn.Module):
    """Adds around its blocks, so that a stage would have to pass on more than a block's input."""

    def __init__(self, width=8, depth=4):
        super().__init__()
        self.into = nn.Linear(5, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, values):
        states = self.into(values)
        for block in self.blocks:
            states = states + block(states)
        return states


class Remembers(Plain):
    """Adds the embedding at the end."""

    def forward(self, ids):
        start = states = self.words(ids)
        for block in self.blocks:
            states = block(states)
        return torch.nn.functional.linear(self.norm(states + start), self.words.weight)


def chain(width=8, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 3)).double()
