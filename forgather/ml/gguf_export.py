"""Export of a model as a GGUF file, as llama.cpp reads it.

Takes a model folder of transformers; gives the folder of the export with `model.gguf`. `gguf_tensors` names and
arranges the weights as llama.cpp expects them, and `gguf_entries` has the sizes of the model. The file is read back
before it is reported: transformers loads it, and it has to give the logits and the greedy tokens of the model.

Shapes:
    H heads, D dimensions of a head, I inputs, O outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, Qwen3ForCausalLM

from forgather.errors import TrainingError, first_line
from forgather.ml.checkpoint.export_folder import FACTS, ExportDraft, export_draft, refuse_place
from forgather.ml.checkpoint.files import CONFIG
from forgather.ml.checkpoint.storage import Storage, remove_tree
from forgather.ml.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.output_comparison import LIMIT, compare, outputs_of, prompts_for

FILE = "model.gguf"
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The types of torch that a file can have, with their names in GGUF."""

_NEEDS = (0, 10)
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


def require_gguf() -> None:
    """Raises an error if the package that writes GGUF files is missing or too old. It is not imported.

    Raises:
        GgufError: FG936.
    """
    try:
        found = version("gguf")
    except PackageNotFoundError:
        found = ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < _NEEDS:
        what = f"found {found}" if found else "not installed"
        raise GgufError(
            f"--gguf needs gguf >= {'.'.join(map(str, _NEEDS))}, {what}",
            code="FG936",
            hint="pip install 'forgather[gguf]'",
        )


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
        >>> interleaved(torch.arange(4)[:, None], 1).flatten().tolist()
        [0, 2, 1, 3]
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def export_gguf(
    source: Path,
    into: Path,
    make: Callable[[Path], Any],
    *,
    dtype: str | None = None,
    name: str = "model",
    storage: Storage | None = None,
) -> dict[str, Any]:
    """Writes a model as a folder with a GGUF file.

    Args:
        source: the folder of the checkpoint or of the saved model.
        into: the new folder, which must not exist yet or must be empty.
        make: a function that writes the model as a folder of transformers, whose path it gets; it is a part of the
            export's hidden folder, and is removed.
        dtype: the type of the weights: a key of `TYPES`; None for the type of the model.
        name: the name of the model in the file.
        storage: the object through which files are written and removed; the local file system by default.

    Returns:
        The `files` by name, the `facts` that `export.json` contains, and a sentence about the `comparison`.

    Raises:
        GgufError: FG936 without the package; FG937 if the model cannot be written; FG933 if the file is another model.
        GgufTokenizerError: FG938 if the tokenizer cannot be written.
        CheckpointError: FG677 if the folder cannot be used or written, and the errors of `make`.
    """
    require_gguf()
    refuse_place(source / "model" if (source / "runs").is_dir() else source, into)
    if (source / CONFIG).is_file():
        # Before the weights are read: a large model takes minutes.
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        architecture_of(config, str((config.architectures or ["model without a class"])[0]))
    with export_draft(into, storage=storage) as draft:
        folder = draft.folder / ".model"
        make(folder)
        of_model = json.loads((folder / FACTS).read_bytes())
        wanted = dtype or (of_model["dtype"][0] if of_model["dtype"][:1] in [[one] for one in TYPES] else "float32")
        found = write_gguf(draft, folder, dtype=wanted, name=name)
        remove_tree(draft.storage, folder)
        kept = {key: value for key, value in of_model.items() if key not in ("kind", "dtype", "written")}
        facts = {"kind": "gguf", "dtype": [wanted], "model": of_model["kind"], **kept, "written": found["figures"]}
        draft.finish(facts)
    return {"files": draft.written(), "facts": facts, "comparison": found["comparison"]}


def write_gguf(draft: ExportDraft, folder: Path, *, dtype: str, name: str) -> dict[str, Any]:
    """Writes the model in a folder as a GGUF file, reads it back and compares it; returns the measured figures.

    Args:
        draft: the draft of the export.
        folder: the folder of the model, as transformers reads it.
        dtype: the type of the weights: a key of `TYPES`.
        name: the name of the model in the file.

    Raises:
        GgufError: FG936 without the package; FG937 if the model cannot be written; FG933 if the file is another model.
        GgufTokenizerError: FG938 if the tokenizer cannot be written.
        CheckpointError: FG677 if the file cannot be written.
    """
    require_gguf()
    with without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    architecture = architecture_of(model.config, type(model).__name__)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    if tokenizer is None:
        raise GgufError("the model has no tokenizer, which a GGUF file contains", hint="leave out --gguf")
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    entries = gguf_tokenizer(tokenizer, rows=model.get_input_embeddings().weight.shape[0], ends=ends)
    with draft.made_file(FILE) as path:
        _write(path, model, architecture, entries, dtype=dtype, name=name)
    return _compared(model, tokenizer, entries, draft.folder, dtype)


def _write(path: Path, model: Any, architecture: str, tokenizer: GgufTokenizer, *, dtype: str, name: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{TYPES[dtype]}"])
    for key, value in gguf_entries(model.config, architecture).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(list(tokenizer.tokens))
    writer.add_token_types([int(kind) for kind in tokenizer.kinds])
    writer.add_token_merges(list(tokenizer.merges))
    for special, number in tokenizer.special.items():
        getattr(writer, f"add_{special}_token_id")(number)
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_eos_token(tokenizer.adds_eos)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
    for key, weight in gguf_tensors(model, architecture):
        values = weight.detach().float().numpy()
        # llama.cpp reads vectors and positions in float32 alone.
        if dtype == "float32" or weight.ndim < 2 or key.startswith("position_embd"):
            writer.add_tensor(key, values)
        else:
            writer.add_tensor(key, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _compared(model: Any, tokenizer: Any, entries: GgufTokenizer, folder: Path, dtype: str) -> dict[str, Any]:
    """Compares a written file with its model: tokenizer, weights and outputs."""
    _refuse_other_content(model, entries, folder / FILE, dtype)
    prompts = prompts_for(model, tokenizer)
    expected = outputs_of(model, prompts)
    generation = model.generation_config
    # transformers does not read the positions of a GPT-2 and the head size of a Qwen3; both are compared as entries.
    more = {"config": model.config} if isinstance(model, GPT2LMHeadModel | Qwen3ForCausalLM) else {}
    try:
        with without_progress_bars():
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=FILE, dtype=torch.float32, local_files_only=True, **more
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _different(f"transformers cannot read it ({first_line(error)[:200]})") from error
    # GGUF has no generation config; both models stop at the same tokens for the comparison.
    read.generation_config = generation
    found = compare(expected, outputs_of(read, prompts))
    if dtype == "float32" and not found.is_equal:
        raise _different(f"{found}, of at most {LIMIT * found.scale:.1e}")
    return {"comparison": str(found), "figures": found.as_dict()}


def _refuse_other_content(model: Any, tokenizer: GgufTokenizer, file: Path, dtype: str) -> None:
    import gguf

    reader = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    architecture = architecture_of(model.config, type(model).__name__)
    for name, value in {"general.architecture": architecture, **gguf_entries(model.config, architecture)}.items():
        entry = reader.fields[name].contents() if name in reader.fields else None
        if entry != (np.float32(value) if isinstance(value, float) else value):
            raise _different(f"its entry {name!r} is {entry!r}")
    wanted = dict(gguf_tensors(model, architecture))
    if set(stored) != set(wanted):
        raise _different("it has other weights")
    for name, weight in wanted.items():
        values = weight.detach().float()
        values = values if stored[name].tensor_type.name == "F32" else values.to(getattr(torch, dtype)).float()
        found = np.asarray(gguf.quants.dequantize(stored[name].data, stored[name].tensor_type))
        if not np.array_equal(found.reshape(values.shape), values.numpy()):
            raise _different(f"the weight {name!r} differs")
    contents = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    expected = {
        "tokens": list(tokenizer.tokens),
        "token_type": [int(kind) for kind in tokenizer.kinds],
        "merges": list(tokenizer.merges),
        "pre": tokenizer.pre,
    }
    for name, value in expected.items():
        if contents.get(f"tokenizer.ggml.{name}") != value:
            raise _different(f"its tokenizer has other entries {name!r}")
    if contents.get("tokenizer.chat_template") != tokenizer.chat_template:
        raise _different("it has another chat template")


def _different(why: str) -> GgufError:
    return GgufError(
        f"the GGUF file is not the model that was trained: {why}",
        code="FG933",
        hint="nothing was written; leave out --gguf to export the model for transformers",
    )
