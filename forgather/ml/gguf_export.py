"""Export of a model as a GGUF file, as llama.cpp reads it.

Takes a model folder of transformers; gives the folder of the export with `model.gguf`. Names and
arrangement of the weights are those of `gguf_layout`, the tokenizer is that of `gguf_tokenizer`. The file is read back
before it is reported: transformers loads it, and it has to give the logits and the greedy tokens of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, Qwen3ForCausalLM

from forgather.errors import first_line
from forgather.ml.checkpoint.export_folder import FACTS, ExportDraft, export_draft, refuse_place
from forgather.ml.checkpoint.files import CONFIG
from forgather.ml.checkpoint.storage import Storage, remove_tree
from forgather.ml.gguf_layout import GgufError, architecture_of, gguf_entries, gguf_tensors
from forgather.ml.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.output_comparison import LIMIT, compare, outputs_of, prompts_for

FILE = "model.gguf"
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The types of torch that a file can have, with their names in GGUF."""

_NEEDS = (0, 10)


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
