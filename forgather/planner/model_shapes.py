"""Shapes of well-known models: what a formula has to know about a model, without downloading or building it.

Takes the name of a model; gives a `ModelShape`. The folder `shapes` has a file for each family of models, with the
configuration of each model as transformers spells it, the number of parameters of the checkpoint and its source. The
number that `ModelShape` computes, this number and the model that transformers builds are the same, which
`tests/planner/test_model_shapes.py` shows for every model.

Units:
    parameters (elements, not bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from forgather.errors import PlanError
from forgather.spelling import close_matches

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes")
FAMILY_NAMES = {
    "causal_lm": "text_generation",
    "fill_mask": "embedding",
    "masked_lm": "embedding",
    "text_embedding": "embedding",
    "text_classification": "embedding",
    "text2text": "text2text_generation",
    "seq2seq": "text2text_generation",
    "image_classification": "vision",
    "diffusion": "text_to_image",
}
"""Other words for the families of the shape files."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One kind of transformer block, and how many of them a model has.

    Args:
        count: the number of blocks.
        hidden_size: the width of the residual stream.
        query_size: the number of query heads times the width of a head.
        kv_size: the number of key and value heads times the width of a head.
        num_heads: the number of query heads.
        intermediate_size: the width inside the feed-forward part.
        gated: True if the feed-forward part has a gate, as SwiGLU has: three matrices in place of two.
        attentions: 1, or 2 if the block also attends to an encoder.
        small_parameters: parameters that are not in a matrix: biases and norms.
        dropout: True if the model is trained with dropout, whose masks are kept.
        activation: the function of the feed-forward part, as transformers calls it.
        fused_inputs: True if one matrix gives queries, keys and values, and one the gate and its factor.
        num_norms: the number of norms.
        rms_norm: True for RMSNorm, which transformers computes by several operators.
        norms_heads: True if queries and keys have norms of their own.
    """

    count: int
    hidden_size: int
    query_size: int
    kv_size: int
    num_heads: int
    intermediate_size: int
    gated: bool
    attentions: int = 1
    small_parameters: int = 0
    dropout: bool = False
    activation: str = "gelu"
    fused_inputs: bool = False
    num_norms: int = 2
    rms_norm: bool = False
    norms_heads: bool = False

    @property
    def linear_layers(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each matrix of a block, in the order q, k, v, o, then the feed-forward part."""
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = (
            (hidden, self.query_size),
            (hidden, self.kv_size),
            (hidden, self.kv_size),
            (self.query_size, hidden),
        )
        return attention * self.attentions + ((hidden, inner),) * (1 + self.gated) + ((inner, hidden),)

    @property
    def parameters(self) -> int:
        """The number of parameters of one block."""
        return sum(inputs * outputs for inputs, outputs in self.linear_layers) + self.small_parameters


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What formulas know about a model.

    Args:
        name: the name on the Hugging Face Hub.
        family: the family of models, such as "text_generation".
        model_class: the class of transformers that builds it.
        config: the configuration, as transformers spells it.
        published_parameters: the number of parameters of the checkpoint.
        blocks: the kinds of blocks.
        other_parameters: parameters outside of the blocks: embeddings, head, last norm.
        vocab_size: the number of classes of each prediction.
        predictions_per_row: None if each token is a prediction, otherwise their number.
        max_tokens: the longest row that the model takes; for images, the number of patches and the class token.
        fixed_tokens: True if rows always have `max_tokens`.
        traced: of a model that is no stack of equal blocks: the `other_parameters`, and for one row the bytes that are
            kept (`kept_half`, `kept_fp32`, `recomputed_half`, `recomputed_fp32`) and `forward_flops`.
    """

    name: str
    family: str
    model_class: str
    config: Mapping[str, Any]
    published_parameters: int
    blocks: tuple[BlockShape, ...]
    other_parameters: int
    vocab_size: int
    predictions_per_row: int | None
    max_tokens: int
    fixed_tokens: bool
    traced: Mapping[str, int] | None = None

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters in the matrices of all blocks."""
        return sum(block.count * inputs * outputs for block in self.blocks for inputs, outputs in block.linear_layers)

    @property
    def block_parameters(self) -> int:
        """The number of parameters in all blocks."""
        return sum(block.count * block.parameters for block in self.blocks)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model; tied weights count once."""
        return self.block_parameters + self.other_parameters

    @property
    def largest_unit(self) -> int:
        """The number of parameters of the largest part that FSDP and ZeRO-3 gather at once."""
        return max(*(block.parameters for block in self.blocks), self.other_parameters)


def shape_names() -> list[str]:
    """Returns the names of all models that have a shape."""
    return list(_entries())


def model_shape(name: str) -> ModelShape:
    """Returns the shape of a model.

    Args:
        name: the name on the Hugging Face Hub, with or without the part before the slash, or a folder with the
            `config.json` of a model of the same kind.

    Raises:
        PlanError: FG998 if no shape has this name.

    Example:
        >>> model_shape("bert-base-uncased").parameters
        109514298
    """
    entries = _entries()
    known = {_plain(word): key for key, entry in reversed(entries.items()) for word in (key, *entry["aliases"])}
    key = known.get(_plain(name))
    if key is None:
        near = dict.fromkeys(known[word] for word in close_matches(_plain(name), known))
        meant = f"did you mean {', '.join(map(repr, near))}? " if near else ""
        raise PlanError(
            f"no shape is known for the model {name!r}",
            code="FG998",
            hint=f"{meant}'fgcli benchmark --list-models' lists the names; a config with any model is planned by "
            "'fgcli plan'",
            found=name,
        )
    entry = entries[key]
    return _shape(key, entry)


def least_parameters(config: Mapping[str, Any]) -> int | None:
    """Returns a number of parameters that a new model has at least; None if that is not known from its configuration.

    Args:
        config: the configuration of a descendant of Llama, as transformers spells it. Without a `vocab_size`, the
            embeddings are left out.

    Example:
        >>> sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        >>> heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
        >>> least_parameters({"model_type": "llama", **sizes, **heads, "vocab_size": 128256})
        8030261248
    """
    if _KINDS.get(config["model_type"]) is not _llama_like:
        return None
    # Defaults of other classes are larger, or add parameters.
    least = {"num_key_value_heads": 1, "head_dim": 1 if "gemma" in config["model_type"] else None}
    if config["model_type"] == "llama":
        least = {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": None}
    try:
        sizes = _llama_like({"vocab_size": 0, "max_position_embeddings": 0, **least, **config})
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return sum(block.count * block.parameters for block in sizes["blocks"]) + int(sizes["other_parameters"])


def model_family(word: str) -> str:
    """Returns the family that a word means.

    Raises:
        PlanError: FG998 if there is no such family.

    Example:
        >>> model_family("fill_mask")
        'embedding'
    """
    families = dict.fromkeys(entry["family"] for entry in _entries().values())
    plain = word.lower().replace("-", "_")
    plain = FAMILY_NAMES.get(plain, plain)
    if plain not in families:
        near = close_matches(plain, [*families, *FAMILY_NAMES], n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(
            f"no model family is called {word!r}",
            code="FG998",
            hint=f"{meant}known are {', '.join(families)}",
            found=word,
        )
    return plain


def _plain(name: str) -> str:
    return name.rstrip("/").split("/")[-1].lower().replace("_", "-")


@cache
def _entries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(os.listdir(_FOLDER)):
        with open(os.path.join(_FOLDER, file), encoding="utf-8") as stream:
            data = json.load(stream)
        shared = {"family": data["family"], "model_class": data["model_class"], "source": data["source"]}
        for name, entry in data["models"].items():
            found[name] = {"aliases": (), **shared, **entry}
    return found


def _shape(name: str, entry: Mapping[str, Any]) -> ModelShape:
    config = entry["config"]
    traced = entry.get("traced", {})
    sizes = _KINDS[config["model_type"]]({**config, **traced})
    return ModelShape(
        name=name,
        family=entry["family"],
        model_class=entry["model_class"],
        config=config,
        published_parameters=entry["parameters"],
        traced=traced or None,
        **sizes,
    )


def _attention(hidden: int, heads: int, *, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, int]:
    width = head_dim or hidden // heads
    sizes = {"query_size": heads * width, "kv_size": (kv_heads or heads) * width}
    return {"hidden_size": hidden, "num_heads": heads, **sizes}


def _sizes(blocks: tuple[BlockShape, ...], other: int, vocab_size: int, max_tokens: int, **rest: Any) -> dict[str, Any]:
    defaults = {"predictions_per_row": None, "fixed_tokens": False}
    found = {"blocks": blocks, "other_parameters": other, "vocab_size": vocab_size, "max_tokens": max_tokens}
    return {**defaults, **found, **rest}


def _llama_like(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of Llama and its descendants: RMSNorm, rotary positions, a gated feed-forward part, no biases."""
    kind, hidden = config["model_type"], config["hidden_size"]
    sizes: dict[str, Any] = _attention(
        hidden,
        config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim"),
    )
    norms = 4 if kind == "gemma2" else 2
    small = norms * hidden
    if kind == "qwen2":
        small += sizes["query_size"] + 2 * sizes["kv_size"]
    if kind == "qwen3":
        small += 2 * config["head_dim"]
    block = BlockShape(
        count=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
        gated=True,
        small_parameters=small,
        activation="gelu_pytorch_tanh" if kind.startswith("gemma") else "silu",
        fused_inputs=kind == "phi3",
        num_norms=norms,
        rms_norm=True,
        norms_heads=kind == "qwen3",
        **sizes,
    )
    tied = config.get("tie_word_embeddings", kind in ("gemma", "gemma2"))
    vocab = config["vocab_size"]
    return _sizes((block,), (2 - tied) * vocab * hidden + hidden, vocab, config["max_position_embeddings"])


def _with_biases(
    hidden: int, inner: int, heads: int, count: int, *, num_norms: int = 2, dropout: bool = True, **rest: Any
) -> BlockShape:
    """A block of the first generation: LayerNorm, two matrices in the feed-forward part, biases everywhere."""
    small = 4 * hidden + inner + hidden + num_norms * 2 * hidden
    return BlockShape(
        count=count,
        intermediate_size=inner,
        gated=False,
        small_parameters=small,
        dropout=dropout,
        num_norms=num_norms,
        **{**_attention(hidden, heads), **rest},
    )


def _opt(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, vocab, tokens = config["hidden_size"], 50272, 2048
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    block = _with_biases(hidden, config["ffn_dim"], heads, count, activation="relu")
    # opt-350m has narrower embeddings, with a matrix on each side, and no last norm.
    width, last_norm = config["word_embed_proj_dim"], 2 * hidden * config.get("do_layer_norm_before", True)
    projections = 2 * width * hidden if width != hidden else 0
    return _sizes((block,), vocab * width + projections + (tokens + 2) * hidden + last_norm, vocab, tokens)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, vocab, tokens = config["n_embd"], 50257, 1024
    heads, count = config["n_head"], config["n_layer"]
    block = _with_biases(hidden, 4 * hidden, heads, count, activation="gelu_new", fused_inputs=True)
    return _sizes((block,), (vocab + tokens + 2) * hidden, vocab, tokens)


def _phi(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    rest: dict[str, Any] = {"num_norms": 1, "dropout": False, "activation": "gelu_new"}
    block = _with_biases(hidden, config["intermediate_size"], heads, count, **rest)
    other = 2 * vocab * hidden + vocab + 2 * hidden
    return _sizes((block,), other, vocab, config["max_position_embeddings"])


def _bert(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    positions, types = config.get("max_position_embeddings", 512), config.get("type_vocab_size", 2)
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    block = _with_biases(hidden, config["intermediate_size"], heads, count)
    head = hidden * hidden + hidden + 2 * hidden + vocab
    return _sizes((block,), (vocab + positions + types + 2) * hidden + head, vocab, min(positions, 512))


def _distilbert(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, vocab, tokens = config["dim"], 30522, 512
    block = _with_biases(hidden, config["hidden_dim"], config["n_heads"], config["n_layers"])
    head = hidden * hidden + hidden + 2 * hidden + vocab
    return _sizes((block,), (vocab + tokens + 2) * hidden + head, vocab, tokens)


def _t5(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads, vocab = config["d_model"], config["num_heads"], config["vocab_size"]
    sizes: dict[str, Any] = _attention(hidden, heads, head_dim=config["d_kv"])
    activation = config.get("feed_forward_proj", "relu")
    sizes |= {"intermediate_size": config["d_ff"], "gated": activation.startswith("gated-"), "dropout": True}
    # "gated-gelu" is what transformers calls the gate of version 1.1; its function is "gelu_new".
    sizes |= {"activation": "relu" if activation == "relu" else "gelu_new", "rms_norm": True}
    encoder = BlockShape(count=config["num_layers"], small_parameters=2 * hidden, **sizes)
    decoder = BlockShape(
        count=config["num_decoder_layers"], small_parameters=3 * hidden, attentions=2, num_norms=3, **sizes
    )
    # Both stacks have a table of 32 relative distances and a last norm; the head is the embedding unless it is untied.
    heads_of_model = 1 if config.get("tie_word_embeddings", True) else 2
    other = heads_of_model * vocab * hidden + 2 * 32 * heads + 2 * hidden
    return _sizes((encoder, decoder), other, vocab, 512)


def _vit(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, classes, tokens = config["hidden_size"], config["num_labels"], (224 // 16) ** 2 + 1
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    block = _with_biases(hidden, config["intermediate_size"], heads, count, dropout=False)
    other = (3 * 16 * 16 + 1) * hidden + (1 + tokens) * hidden + 2 * hidden + (hidden + 1) * classes
    return _sizes((block,), other, classes, tokens, predictions_per_row=1, fixed_tokens=True)


def _sdxl_unet(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a U-Net: its transformer blocks; resnets and embeddings are other parameters, as a whole."""
    text, layers = config["cross_attention_dim"], config["layers_per_block"]
    widths, depths = config["block_out_channels"], config["transformer_layers_per_block"]
    # A level has `layers` transformers on the way down and one more on the way up; the lowest has one in the middle.
    counts = {width: depth * (2 * layers + 1) for width, depth in zip(widths[1:], depths[1:], strict=True)}
    counts[widths[-1]] += depths[-1]
    blocks = []
    for width, count in counts.items():
        # The second attention reads keys and values of the text; biases of o and of the feed-forward part; norms.
        small = 2 * (text - width) * width + 2 * width + (8 + 1) * width + 3 * 2 * width
        sizes: dict[str, Any] = _attention(width, width // 64)
        sizes |= {"intermediate_size": 4 * width, "gated": True, "attentions": 2, "num_norms": 3}
        blocks.append(BlockShape(count=count, small_parameters=small, **sizes))
    tokens = (config["sample_size"] // 2 ** (len(widths) - 1)) ** 2
    return _sizes(tuple(blocks), config["other_parameters"], 0, tokens, predictions_per_row=1, fixed_tokens=True)


_KINDS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), _llama_like),
    "opt": _opt,
    "gpt2": _gpt2,
    "phi": _phi,
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "t5": _t5,
    "vit": _vit,
    "sdxl_unet": _sdxl_unet,
}
