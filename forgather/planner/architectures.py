"""The sizes of transformer models by their configuration: the kinds of blocks, and the parameters outside of them.

Takes a configuration as transformers spells it. `architecture_sizes` gives the sizes of an architecture that is known;
`least_parameters` gives a number of parameters that a model has at least, from a part of its configuration.

Units:
    parameters (elements, not bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


def architecture_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `ModelShape` that follow from a configuration.

    Args:
        config: the complete configuration of a model whose `model_type` is known.
    """
    return _KINDS[config["model_type"]](config)


def least_parameters(config: Mapping[str, Any]) -> int | None:
    """Returns a number of parameters that a new model has at least; None if that is not known from its configuration.

    Args:
        config: the configuration of a descendant of Llama, as transformers spells it. Without a `vocab_size`, the
            embeddings are left out.
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
    blocks: tuple[BlockShape, ...] = sizes["blocks"]
    return sum(block.count * block.parameters for block in blocks) + int(sizes["other_parameters"])


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
