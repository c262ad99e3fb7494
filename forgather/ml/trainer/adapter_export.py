"""Export of a trained adapter: merged into its base model, or as a folder that peft loads.

Takes a `TrainedAdapter`; gives a folder. Nothing is reported that was not compared: the written model is read back by
transformers or peft, and has to give the logits and the greedy tokens of the adapter. All of it happens in a hidden
folder, see `checkpoint/export_folder.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from forgather.errors import first_line
from forgather.ml.adapter_base import BaseModel, adapter_files, base_of, is_peft_model, names_of_adapter
from forgather.ml.adapters import refuse_unreadable
from forgather.ml.checkpoint.averaged_weights import warn_of_average
from forgather.ml.checkpoint.export import describing_files, refuse_changed, types_of
from forgather.ml.checkpoint.export_folder import ExportDraft, bytes_of, export_draft, refuse_place
from forgather.ml.checkpoint.files import ADAPTER, ADAPTER_CONFIG, BASE_MODEL, CONFIG, MODEL
from forgather.ml.checkpoint.hf_layout import SHARD_SIZE, weight_files
from forgather.ml.checkpoint.manifest import Manifest
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.hub import hub_access
from forgather.ml.library_progress import without_peft_warnings, without_progress_bars
from forgather.ml.model_class import user_class
from forgather.ml.output_comparison import LIMIT, Comparison, Outputs, compare, outputs_of, prompts_for
from forgather.ml.random_state import forked_random
from forgather.ml.trained_adapter import ExportError, TrainedAdapter
from forgather.ml.trainer.snapshot import described_files, files_of_self_saving_model

_TEXT = "Once upon a time: 3.14, \u00e4\u20ac\n  def f(x):"


def export_merged(
    trained: TrainedAdapter,
    into: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | int = SHARD_SIZE,
    storage: Storage | None = None,
) -> dict[str, Any]:
    """Merges an adapter into its base model, and writes the result as a model of transformers.

    Weights are added in float32 and rounded at the end. The logits and the greedy tokens of the merged model are
    compared with those of the adapter, before and after it is written.

    Args:
        trained: the adapter.
        into: the new folder, which must not exist yet or must be empty.
        dtype: the type of the floating-point weights: "float32", "bfloat16" or "float16". None uses the types of the
            base model, or those of the dequantized one.
        max_shard_size: the maximum size of one weight file, in bytes or as a string such as "5GB".
        storage: the object through which files are written and removed; the local file system by default.

    Returns:
        `files`, as `export_checkpoint` returns them, and the `facts` that `export.json` contains.

    Raises:
        ExportError: FG931 to FG934; FG933 if the merged model is not the same model.
        CheckpointError: FG603 or FG604 if a file of the checkpoint is damaged; FG677 if an argument is not allowed, or
            if the folder cannot be written.
    """
    shard_size = bytes_of(max_shard_size)
    manifest = _checked(trained, into)
    with export_draft(into, storage=storage) as draft:
        base = trained.base()
        known, kind = base_of(base), user_class(base.get_base_model() if is_peft_model(base) else base)  # type: ignore[operator]
        types = {name: value.dtype for name, value in base.state_dict().items()}
        merged, prompts, expected = _merged(trained, base)
        merge = _judged(compare(expected, outputs_of(merged, prompts)), "the merged model in memory")
        state = _rounded(merged, types, dtype)
        layout = weight_files(merged, state, shard_size=shard_size)
        layout.write(draft)
        _write_descriptions(draft, merged, trained.folder, manifest, types_of(layout))
        is_rounded = any(state[name].dtype != value.dtype for name, value in merged.state_dict().items())
        del merged, base
        written = compare(expected, outputs_of(_read_back(draft, kind, state).float(), prompts))
        facts = {
            "kind": "merged",
            **_source_facts(known, types_of(layout), manifest),
            "merge": merge.as_dict(),
            "written": (written if is_rounded else _judged(written, "the merged model as it was written")).as_dict(),
        }
        _compare_tokenizers(trained.folder, draft.folder)
        draft.finish(facts)
    return {"files": draft.written(), "facts": facts, "comparison": str(merge)}


def _merged(trained: TrainedAdapter, base: nn.Module) -> tuple[Any, list[Tensor], Outputs]:
    """Returns the merged model in float32, prompts, and what the adapter gave for them before it was merged."""
    usual = next((value.dtype for value in base.parameters() if value.is_floating_point()), torch.float32)
    model: Any = trained.on(base).float()
    prompts = prompts_for(model.get_base_model(), _tokenizer(trained.folder), tokens=_trained_tokens(model))
    expected = outputs_of(model, prompts)
    merged = _untied(model.merge_and_unload())
    merged.config.dtype = usual
    return merged, prompts, expected


def _rounded(merged: Any, types: Mapping[str, torch.dtype], dtype: str | None) -> dict[str, Tensor]:
    """Returns the weights of a merged model in the type that is written.

    Args:
        merged: the model.
        types: the types of the base model's weights.
        dtype: the name of the type for all weights; None for those of the base model.
    """
    state: dict[str, Tensor] = merged.state_dict()
    usual = merged.config.dtype
    return {
        name: value.to(getattr(torch, dtype) if dtype else types.get(name, usual))
        if value.is_floating_point()
        else value
        for name, value in state.items()
    }


def _checked(trained: TrainedAdapter, into: Path) -> Manifest | None:
    """Checks target and source before anything is computed; returns the manifest of a checkpoint."""
    refuse_place(trained.folder if trained.is_checkpoint else trained.folder / MODEL, into)
    if not (trained.folder / ADAPTER_CONFIG).is_file():
        raise not_an_adapter(trained.folder)
    manifest = trained.manifest
    if manifest is not None:
        refuse_changed(trained.folder, manifest)
        warn_of_average(trained.folder)
    else:
        refuse_unreadable(trained.folder)
    return manifest


def not_an_adapter(folder: Path) -> ExportError:
    """Returns the FG930 error for a folder with a whole model."""
    return ExportError(
        f"{str(folder)!r} holds a whole model, and no adapter",
        hint="leave out --merge and --adapter: 'fgcli export RUN OUT' writes the model",
    )


def _judged(found: Comparison, what: str) -> Comparison:
    if found.is_equal:
        return found
    raise ExportError(
        f"{what} is not the model that was trained: {found}, of at most {LIMIT * found.scale:.1e}",
        code="FG933",
        hint="nothing was written; --adapter exports the adapter as it is",
    )


def _untied(merged: Any) -> Any:
    """Corrects the configuration of a model in which an adapter has replaced one of two tied weights."""
    ends = merged.get_output_embeddings()
    if getattr(merged.config, "tie_word_embeddings", False) and ends is not None:
        first, last = merged.get_input_embeddings().weight, ends.weight
        if first is not last and not torch.equal(first, last):
            merged.config.tie_word_embeddings = False
            # transformers leaves out the weights that are listed here.
            merged.all_tied_weights_keys = {}
    return merged


def _write_descriptions(
    draft: ExportDraft, merged: Any, source: Path, manifest: Manifest | None, types: list[str]
) -> None:
    # A merged model is not quantized, whatever its base was.
    if hasattr(merged.config, "quantization_config"):
        del merged.config.quantization_config
    texts = described_files(merged, None)
    facts = {**json.loads(texts[CONFIG]), **({"dtype": types[0]} if len(types) == 1 else {})}
    texts[CONFIG] = (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()
    for name in _own_files(source, manifest):
        texts[name] = (source / name).read_bytes()
    for name, content in texts.items():
        draft.write(name, [content])


def _own_files(source: Path, manifest: Manifest | None) -> list[str]:
    """Returns the names of the files next to an adapter that describe its model: tokenizer, template, generation."""
    left_out = (ADAPTER_CONFIG, BASE_MODEL, ADAPTER, CONFIG)
    return [name for name in describing_files(source, manifest) if name not in left_out]


def _source_facts(base: BaseModel | None, types: list[str], manifest: Manifest | None) -> dict[str, Any]:
    base = base or BaseModel()
    facts = {"dtype": types, "base": {"name": base.name, "digest": base.digest}}
    return facts if manifest is None else {**facts, "step": manifest.step}


def _read_back(draft: ExportDraft, loader: Any, state: Mapping[str, Tensor]) -> Any:
    """Returns the model that transformers reads from the written files; all of its weights are those in `state`."""
    with without_progress_bars(), forked_random(0), torch.device("cpu"):
        read, facts = loader.from_pretrained(
            draft.folder, dtype="auto", local_files_only=True, output_loading_info=True
        )
    wrong = sorted([*facts["missing_keys"], *map(str, facts["mismatched_keys"]), *facts["unexpected_keys"]])
    found = read.state_dict()
    # Compared in the stored type: `from_pretrained` gives all weights of a model one type.
    wrong += [name for name, value in state.items() if name not in found or not _same(found[name], value)]
    if wrong:
        raise ExportError(
            f"the merged model cannot be read back: {wrong[0]!r:.80} is not what was written",
            code="FG933",
            hint="nothing was written; --adapter exports the adapter as it is",
        )
    return read


def _same(found: Tensor, written: Tensor) -> bool:
    return found.shape == written.shape and torch.equal(found.cpu(), written.cpu().to(found.dtype))


def _trained_tokens(model: Any) -> list[int]:
    rows = model.peft_config[model.active_adapters[0]].trainable_token_indices
    lists = rows.values() if isinstance(rows, Mapping) else [rows or ()]
    return sorted({int(one) for indices in lists for one in indices})


def _tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in a folder; None if there is none."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the reader of tokenizers raises errors of no other class
        raise ExportError(
            f"the tokenizer in {str(folder)!r} cannot be read: {first_line(error)[:200]}",
            hint="restore its files, or export a checkpoint: --checkpoint last",
        ) from error


def _compare_tokenizers(source: Path, written: Path) -> None:
    one, other = _tokenizer(source), _tokenizer(written)
    if one is None:
        return
    same_ids = one(_TEXT)["input_ids"] == other(_TEXT)["input_ids"]
    if not same_ids or one.chat_template != other.chat_template:
        raise ExportError("the exported tokenizer is not the one of the run", code="FG933", hint="nothing was written")


def export_adapter(
    trained: TrainedAdapter, into: Path, *, dtype: str | None = None, storage: Storage | None = None
) -> dict[str, Any]:
    """Writes an adapter as a folder that `peft.PeftModel.from_pretrained` loads, and which names the base model.

    The folder is loaded onto another copy of the base model, and has to give the same logits and greedy tokens.

    Args:
        trained: the adapter.
        into: see `export_merged`, as the other arguments.
        dtype: see there. None keeps the types of the adapter.
        storage: see there.

    Returns:
        `files`, as `export_checkpoint` returns them, and the `facts` that `export.json` contains.

    Raises:
        ExportError: FG931 to FG934; FG935 if the base model has no name by which others could load it.
        CheckpointError: as for `export_merged`.
    """
    manifest = _checked(trained, into)
    with export_draft(into, storage=storage) as draft:
        base = trained.base()
        known = base_of(base) or BaseModel()
        if not known.name:
            raise ExportError(
                "the base model of the adapter has no name: it was not loaded from a folder or from the Hub",
                code="FG935",
                hint="--merge writes a model that contains the base",
            )
        fresh: Any = copy.deepcopy(base) if trained.adapter is not None else None
        model: Any = trained.on(base)
        if fresh is None:
            fresh = _without_adapter(copy.deepcopy(model))
        with hub_access():
            texts = files_of_self_saving_model(model, _adapter_weights(model, dtype), None)
        texts |= adapter_files(model) | {
            name: (trained.folder / name).read_bytes() for name in _own_files(trained.folder, manifest)
        }
        texts.pop("README.md", None)
        for name, content in texts.items():
            draft.write(name, [content])
        types = sorted({str(v.dtype).removeprefix("torch.") for v in load_file(draft.folder / ADAPTER).values()})
        prompts = prompts_for(model.get_base_model(), _tokenizer(trained.folder), tokens=_trained_tokens(model))
        own = {value.dtype for name, value in model.state_dict().items() if name in names_of_adapter(model)}
        is_rounded = {str(one).removeprefix("torch.") for one in own} != set(types)
        expected = outputs_of(model.float(), prompts)
        found = compare(expected, _outputs_by_peft(fresh, draft.folder, prompts))
        facts = {
            "kind": "adapter",
            **_source_facts(known, types, manifest),
            "written": (found if is_rounded else _judged(found, "the adapter as peft loads it")).as_dict(),
        }
        _compare_tokenizers(trained.folder, draft.folder)
        draft.finish(facts)
    return {"files": draft.written(), "facts": facts, "comparison": str(found)}


def _adapter_weights(model: Any, dtype: str | None) -> dict[str, Tensor]:
    own = names_of_adapter(model) | {name for name, value in model.named_parameters() if value.requires_grad}
    wanted = getattr(torch, dtype) if dtype else None
    return {
        name: value.to(wanted) if wanted is not None and name in own and value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }


def _without_adapter(model: Any) -> nn.Module:
    config = model.peft_config[model.active_adapters[0]]
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ExportError(
            f"init_lora_weights: {config.init_lora_weights} changes the base model, which the config wraps itself",
            code="FG932",
            hint="use the block [adapter] of the config, or export with --merge",
        )
    base: nn.Module = model.unload()
    return base


def _outputs_by_peft(base: Any, folder: Path, prompts: list[Tensor]) -> Outputs:
    import peft

    with without_peft_warnings():
        loaded = peft.PeftModel.from_pretrained(base, str(folder), torch_device="cpu")
    return outputs_of(loaded.float(), prompts)
