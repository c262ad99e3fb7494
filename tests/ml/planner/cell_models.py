"""The models of the cells, each with rows on which it can be trained."""

import functools

import torch
from torch import nn
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    ViTConfig,
)

from forgather.ml.classifiers import classifier_from_config
from forgather.ml.models import seq2seq_from_config
from tests.ml.fixtures import tiny_llama

LENGTH, VOCABULARY, ROWS = 64, 512, 256
LABELS = ["a", "b", "c"]
OWN = ("own", "hourglass")
"""Modules that return class scores."""

WIDTH = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}


class Own(nn.Module):
    """A module of the user: convolutions with batch normalization, and a branch without blocks that repeat."""

    def __init__(self, layers):
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.GELU()) for _ in range(layers)
        )
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24 * 64, 96), nn.Tanh(), nn.Linear(96, 3))

    def forward(self, pixel_values):
        found = self.first(pixel_values)
        for block in self.blocks:
            found = found + block(found)
        return self.head(found)


class Hourglass(nn.Module):
    """Convolutions of all kinds: with strides, gaps and groups, by channel, transposed, and one of each width."""

    def __init__(self, layers, width=20):
        super().__init__()
        wide = 2 * width
        self.stem = nn.Conv2d(3, width, 5, padding=2, bias=False)
        self.down = nn.Conv2d(width, wide, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, wide, 5, padding=2, groups=wide),
                nn.GroupNorm(4, wide),
                nn.Conv2d(wide, 2 * wide, 1),
                nn.SiLU(),
                nn.Conv2d(2 * wide, wide, 3, padding=2, dilation=2, groups=1 + number % 2),
            )
            for number in range(layers)
        )
        self.up = nn.ConvTranspose2d(wide, width, 4, stride=2, padding=1)
        self.mix = nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Linear(width, 3)

    def forward(self, pixel_values):
        first = nn.functional.silu(self.stem(pixel_values))
        found = self.down(first)
        for block in self.blocks:
            found = found + block(found)
        found = self.mix(nn.functional.silu(torch.cat([self.up(found), first], dim=1)))
        return self.head(found.mean((2, 3)))


def model(name, layers, **sizes) -> nn.Module:
    """Returns a model by its name."""
    return _MODELS[name](layers, **sizes)


def _llama(layers, **sizes):
    return tiny_llama(**{"vocab_size": VOCABULARY, **WIDTH, "num_hidden_layers": layers, **sizes})


def _gpt2(layers, **sizes):
    config = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 64, "n_head": 4, "n_layer": layers, **sizes}
    return GPT2LMHeadModel(GPT2Config(**config))


def _mistral(layers, **sizes):
    config = {"vocab_size": VOCABULARY, **WIDTH, "num_key_value_heads": 2, "sliding_window": 32, **sizes}
    return MistralForCausalLM(MistralConfig(num_hidden_layers=layers, **config))


def _qwen(layers, **sizes):
    config = {"vocab_size": VOCABULARY, **WIDTH, "num_key_value_heads": 2, "head_dim": 32, **sizes}
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, tie_word_embeddings=True, **config))


def _bert(layers, **sizes):
    config = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **{**WIDTH, **sizes})
    return classifier_from_config(config, task="classification", labels=LABELS)


def _t5(layers, **sizes):
    config = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_heads": 4, **sizes}
    made = T5Config(num_layers=layers, **config)
    made.decoder_start_token_id = 0
    return seq2seq_from_config(made)


def _vit(layers, **sizes):
    config = ViTConfig(**{**WIDTH, "num_hidden_layers": layers, "image_size": 32, "patch_size": 4, **sizes})
    return classifier_from_config(config, task="image_classification", labels=LABELS)


_MODELS = {
    "llama": _llama,
    "gpt2": _gpt2,
    "mistral": _mistral,
    "qwen": _qwen,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "own": Own,
    "hourglass": Hourglass,
}


@functools.cache
def rows(name, length=LENGTH):
    """Returns the rows on which a model can be trained. They are made once, before anything is measured."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, len(LABELS), (ROWS,), generator=draw)
    if name in ("vit", *OWN):
        side = 32 if name == "vit" else 16
        pixels = torch.rand((ROWS, 3, side, side), generator=draw)
        return [{"pixel_values": one, "labels": label} for one, label in zip(pixels, labels, strict=True)]
    ids = torch.randint(2, VOCABULARY, (ROWS, length), generator=draw)
    if name == "bert":
        return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]
    if name == "t5":
        return [{"input_ids": one, "labels": one[: length // 2].clone()} for one in ids]
    return [{"input_ids": one, "labels": one.clone()} for one in ids]
