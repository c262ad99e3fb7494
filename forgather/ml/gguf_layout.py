"""The names and the arrangement of a model's weights in a GGUF file, and its sizes there.

Takes a model of transformers; gives what llama.cpp expects. A model for which llama.cpp would compute something else is
refused.

Shapes:
    H heads, D dimensions of a head, I inputs, O outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from forgather.errors import TrainingError

_ROTATED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GPT2 = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    # llama.cpp has no architecture of that name: without a window, a Mistral is a Llama.
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GPT2LMHeadModel": "gpt2",
}
# What each architecture computes in llama.cpp; a model with another value would be another model there.
_FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)},
    "qwen2": {"hidden_act": ("silu",), "use_sliding_window": (False, None)},
    "qwen3": {"hidden_act": ("silu",), "use_sliding_window": (False, None), "attention_bias": (False, None)},
    "gpt2": {
        "activation_function": ("gelu_new",),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}


class GgufError(TrainingError, ValueError):
    """Raised if a model cannot be written as a GGUF file."""

    code = "FG937"


def architecture_of(config: Any, kind: str) -> str:
    """Returns the name of a model's architecture in GGUF.

    Args:
        config: the configuration of the model.
        kind: the name of the model's class.

    Raises:
        GgufError: FG937 if llama.cpp would compute something else.
    """
    hint = f"these can be written: {', '.join(_ARCHITECTURES)}; leave out --gguf for transformers"
    if kind not in _ARCHITECTURES:
        raise GgufError(f"a {kind} cannot be written as a GGUF file", hint=hint)
    found = _ARCHITECTURES[kind]
    settings: dict[str, Any] = {
        name: getattr(config, name)
        for name, allowed in _FIXED[found].items()
        if getattr(config, name, allowed[0]) not in allowed
    }
    window = getattr(config, "sliding_window", None)
    if kind == "MistralForCausalLM" and window is not None and window < config.max_position_embeddings:
        settings["sliding_window"] = window
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope != "default":
        settings["rope_type"] = rope
    if found == "gpt2" and config.n_inner not in (None, 4 * config.n_embd):
        settings["n_inner"] = config.n_inner
    if found == "qwen2" and _head_size(config) * config.num_attention_heads != config.hidden_size:
        settings["head_dim"] = config.head_dim
    for name, value in settings.items():
        raise GgufError(f"a {kind} with {name}: {value!r} cannot be written as a GGUF file", hint=hint)
    return found


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def gguf_entries(config: Any, architecture: str) -> dict[str, Any]:
    """Returns the sizes of a model by their names in a GGUF file.

    Args:
        config: the configuration of the model.
        architecture: the result of `architecture_of`.
    """
    if architecture == "gpt2":
        sizes = {
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "feed_forward_length": 4 * config.n_embd,
            "block_count": config.n_layer,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        }
    else:
        sizes = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "block_count": config.num_hidden_layers,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": _head_size(config),
            "attention.value_length": _head_size(config),
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.dimension_count": _head_size(config),
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "vocab_size": config.vocab_size,
        }
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


def gguf_tensors(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a model by their names in a GGUF file, in the arrangement of llama.cpp.

    Args:
        model: the model.
        architecture: the result of `architecture_of`.

    Shapes:
        Yields (O, I) for linear layers, also for those of GPT-2, which transformers stores as (I, O).

    Raises:
        GgufError: FG937 if a weight has no name there.
    """
    config, names = model.config, _GPT2 if architecture == "gpt2" else _ROTATED
    tied = bool(config.tie_word_embeddings)
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        found = _LAYER.fullmatch(name)
        new = names.get(name) if found is None else names.get(found[2])
        if new is None:
            raise GgufError(f"the weight {name!r:.80} has no name in a GGUF file of this architecture")
        if found is not None:
            new = f"blk.{found[1]}.{new}.{found[3]}"
        if architecture == "llama" and found is not None and found[2] in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = interleaved(weight, heads)
        elif architecture == "gpt2" and found is not None and ".c_" in name and found[3] == "weight":
            weight = weight.T
        yield new, weight.contiguous()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Returns the rows of a query or key projection in the order that llama.cpp rotates.

    transformers rotates the first half of a head with the second one; for a Llama, llama.cpp rotates neighbors.

    Args:
        weight: the weight of the projection.
        heads: the number of heads.

    Shapes:
        weight: (H * D, I). Returns (H * D, I).

    Example:
        >>> import torch
        >>> interleaved(torch.arange(4)[:, None], 1).flatten().tolist()
        [0, 2, 1, 3]
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
