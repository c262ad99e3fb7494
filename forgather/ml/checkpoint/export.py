"""Export of a whole model as a Hugging Face folder (`fgcli export` and `fgcli ckpt export`).

The model of a checkpoint, or the one that a run saved at its end, is written to a new folder in the layout of
`save_pretrained`, with the SHA-256 of each file. The weights of a checkpoint are verified against the manifest before
they are read. The folder appears when it is complete, see `export_folder`. Custom code that the configuration refers to
(`auto_map`) is never run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.averaged_weights import warn_of_average
from forgather.ml.checkpoint.export_folder import bytes_of, export_draft, refuse_place
from forgather.ml.checkpoint.files import (
    ADAPTER_CONFIG,
    BASE_MODEL,
    CONFIG,
    CUSTOM,
    EXTRA_STATE,
    INDEX,
    MODEL,
    OPTIMIZER,
    SLICES,
    TRAINER_STATE,
    TRAINING_ARGS,
    TRAINING_STATE,
    WEIGHTS,
    WEIGHTS_INDEX,
)
from forgather.ml.checkpoint.hf_layout import (
    SHARD_SIZE,
    WeightFiles,
    model_on_meta,
    split_into_files,
    weight_files,
    weight_name_mismatch,
)
from forgather.ml.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    changed_files,
    malformed_file,
    missing_file,
    read_manifest,
    read_small_file,
)
from forgather.ml.checkpoint.reader import CheckpointReader, whole_weights
from forgather.ml.checkpoint.spilled import SpilledTensors
from forgather.ml.checkpoint.state import read_tensors
from forgather.ml.checkpoint.storage import Bytes, Storage
from forgather.ml.model_class import class_name

_OF_THE_RUN = (INDEX, TRAINER_STATE, TRAINING_ARGS, MANIFEST)
_STATE_OF_THE_RUN = (OPTIMIZER, TRAINING_STATE, f"{CUSTOM}/")
_DESCRIBING = re.compile(
    r"(generation_|processor_|preprocessor_|video_preprocessor_)?config\.json|.*token.*\.json|vocab.*\.(json|txt)"
    r"|merges\.txt|chat_template\.(jinja|json)|.*\.(model|py)"
)
"""The files next to the weights of a saved model that describe it; its folder may contain the user's own files."""
_PIECE = 1 << 22
_COMPILED, _OF_PEFT = "_orig_mod.", "base_model.model."
"""The prefixes that `torch.compile` and peft add to the weight names of the model that they wrap."""
# `max_window_layers` of Qwen is the first layer with a window, which may be beyond the last layer.
_LAYERS = re.compile(r"(?<!max_window_)layers?$|^depth$")
_ADAPTED = (
    "it holds an adapter without its base model",
    "'fgcli export RUN --merge' merges it into the base model, and --adapter writes it as a folder for peft",
)
_GO_ON = "save the model with the code that built it: resume from the checkpoint, and the run saves it at its end"


def export_checkpoint(
    source: Path,
    into: Path,
    *,
    max_shard_size: str | int = SHARD_SIZE,
    dtype: str | None = None,
    storage: Storage | None = None,
) -> dict[str, dict[str, Any]]:
    """Writes the model of a checkpoint to a new folder, and returns {"bytes": ..., "sha256": ...} by file name.

    Args:
        source: the folder of the checkpoint, which any number of processes may have written.
        into: the new folder, which must not exist yet or must be empty.
        max_shard_size: the maximum size of one weight file, in bytes or as a string such as "5GB".
        dtype: the type to which floating-point weights are converted: "float32", "bfloat16" or "float16". None keeps
            their types.
        storage: the object through which files are written and removed; the local file system by default.

    Raises:
        CheckpointError: FG603 or FG604 if a file of the checkpoint is changed or missing; FG611 if a file does not have
            the form in which a run writes it; FG612 if no class of transformers can load the weights; FG677 if an
            argument is not allowed or the model cannot be written.
    """
    manifest = read_manifest(source)
    # The arguments are checked first: reading and hashing a large checkpoint takes minutes.
    shard_size = bytes_of(max_shard_size)
    refuse_place(source, into)
    refuse_changed(source, manifest)
    warn_of_average(source)
    weights = weights_in_type(whole_weights(source), dtype, place=SpilledTensors(_disk_of(into)))
    layout = _weight_files(source, manifest, weights, shard_size)
    return _written(source, into, layout, describing_files(source, manifest), dtype, storage)


def export_saved_model(
    source: Path,
    into: Path,
    *,
    max_shard_size: str | int = SHARD_SIZE,
    dtype: str | None = None,
    storage: Storage | None = None,
) -> dict[str, dict[str, Any]]:
    """Writes the model that a run saved at its end to a new folder, and returns the facts of `export_checkpoint`.

    Args:
        source: the folder of the model, which may contain other files.
        into: see `export_checkpoint`, as the other arguments.
        max_shard_size: see there.
        dtype: see there.
        storage: see there.

    Raises:
        CheckpointError: FG604 if a file is missing; FG611 if a file cannot be read; FG612 if the folder has an adapter
            in place of a whole model; FG677 if an argument is not allowed or the model cannot be written.
    """
    shard_size = bytes_of(max_shard_size)
    refuse_place(source / MODEL, into)
    if (source / ADAPTER_CONFIG).is_file():
        raise _not_of_a_class(source, *_ADAPTED)
    # Without another type they are mapped from their files, and take no memory.
    place = None if dtype is None else SpilledTensors(_disk_of(into))
    weights = weights_in_type(saved_weights(source).items(), dtype, place=place)
    layout = split_into_files(weights, shard_size=shard_size)
    return _written(source, into, layout, describing_files(source, None), dtype, storage)


def _written(
    source: Path, into: Path, layout: WeightFiles, others: list[str], dtype: str | None, storage: Storage | None
) -> dict[str, dict[str, Any]]:
    with export_draft(into, storage=storage) as draft:
        layout.write(draft)
        for name in others:
            draft.write(name, _content(source / name, dtype if name == CONFIG else None))
        draft.finish({"kind": "model", "dtype": types_of(layout)})
    return draft.written()


def types_of(layout: WeightFiles) -> list[str]:
    """Returns the names of the types of the floating-point weights, sorted."""
    tensors = (tensor for file in layout.tensors.values() for tensor in file.values())
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()})


def describing_files(source: Path, manifest: Manifest | None) -> list[str]:
    """Returns the names of the files that describe a model: configurations, tokenizer, chat template, code.

    Args:
        source: the folder of the model.
        manifest: the manifest of a checkpoint; None for a model that a run saved at its end.
    """
    if manifest is not None:
        return [name for name in manifest.files if not _is_of_the_run(name) and not _is_of_weights(name)]
    names = sorted(file.name for file in source.iterdir() if file.is_file() and _DESCRIBING.fullmatch(file.name))
    more = sorted(source.glob("additional_chat_templates/*.jinja"))
    own = (*_OF_THE_RUN, BASE_MODEL, ADAPTER_CONFIG)
    return [name for name in names if name not in own] + [file.relative_to(source).as_posix() for file in more]


def saved_weights(source: Path) -> dict[str, Tensor]:
    """Returns the weights in a model folder, by the names in its files.

    Raises:
        CheckpointError: FG604 if a file is missing; FG611 if a file cannot be read.

    Shapes:
        Returns tensors of any shape, on the CPU.
    """
    if (source / WEIGHTS).is_file() or not (source / WEIGHTS_INDEX).is_file():
        return read_tensors(source / WEIGHTS)
    try:
        placed = json.loads(read_small_file(source / WEIGHTS_INDEX))["weight_map"]
        files = sorted({Path(name).name for name in placed.values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise malformed_file(source / WEIGHTS_INDEX, f"it lists no files ({error!s:.80})") from None
    found: dict[str, Tensor] = {}
    for file in files:
        found |= read_tensors(source / file)
    if lost := sorted(set(placed) - set(found)):
        raise missing_file(source / placed[lost[0]])
    return found


def loadable_weights(source: Path) -> dict[str, Tensor]:
    """Returns the weights of a verified checkpoint under the names that `from_pretrained` reads, whole and on the CPU.

    Args:
        source: the folder of the checkpoint.

    Shapes:
        Returns tensors of any shape.

    Raises:
        CheckpointError: FG611 if a file does not have the form in which a run writes it; FG612 if no class of
            transformers can load the weights.
    """
    weights = weights_in_type(whole_weights(source), None)
    files = _weight_files(source, read_manifest(source), weights, bytes_of(SHARD_SIZE))
    return {name: tensor for tensors in files.tensors.values() for name, tensor in tensors.items()}


def _is_of_the_run(name: str) -> bool:
    return name in _OF_THE_RUN or name.startswith(_STATE_OF_THE_RUN)


def _is_of_weights(name: str) -> bool:
    return name.startswith((MODEL, SLICES)) and ".safetensors" in name and not name.startswith(EXTRA_STATE)


def refuse_changed(source: Path, manifest: Manifest) -> None:
    """Raises an error for the first file of the model that is changed or missing.

    Args:
        source: the folder of a checkpoint.
        manifest: its manifest.

    Raises:
        CheckpointError: FG603 or FG604.
    """
    # Optimizer and training state may be missing and are most of the bytes; the model does not need them.
    files = {name: fact for name, fact in manifest.files.items() if not name.startswith(_STATE_OF_THE_RUN)}
    for error in changed_files(source, dataclasses.replace(manifest, files=files)):
        raise error


def weights_in_type(
    weights: Iterable[tuple[str, Tensor]], dtype: str | None, *, place: SpilledTensors | None = None
) -> dict[str, Tensor]:
    """Returns weights by name without the prefix of torch.compile, with floating-point weights in another type.

    Args:
        weights: names and weights.
        dtype: the name of the type; None to keep the types.
        place: the place of the returned weights; None to keep all in memory.

    Shapes:
        weights: any.
    """
    wanted = None if dtype is None else getattr(torch, dtype)
    found: dict[str, Tensor] = {}
    for name, tensor in weights:
        converted = tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
        found[name.removeprefix(_COMPILED)] = converted if place is None else place.keep(converted)
    return found


def _disk_of(folder: Path) -> Path:
    """Returns the nearest folder that exists, on the disk on which a new folder will be."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


def _weight_files(source: Path, manifest: Manifest, weights: Mapping[str, Tensor], shard_size: int) -> WeightFiles:
    # A checkpoint of a peft model has base weights and adapters under peft's names, which no class can load.
    if ADAPTER_CONFIG in manifest.files or any(name.startswith(_OF_PEFT) or ".lora_" in name for name in weights):
        raise _not_of_a_class(source, *_ADAPTED)
    try:
        # A model with its own code has no class in transformers; its weights are exported under the names that they
        # have.
        model = _skeleton(source, weights) if CONFIG in manifest.files else None
        if model is None:
            return split_into_files(weights, shard_size=shard_size)
        # In the order of the model, as `save_pretrained` has it: the order decides which weights share a file.
        ordered = {name: weights[name] for name in model.state_dict() if name in weights}
        return weight_files(model, ordered, shard_size=shard_size)
    except ValueError as error:
        raise CheckpointError(
            f"the model cannot be exported: {error}", code="FG677", hint=f"see 'fgcli ckpt show {source}'"
        ) from None


def _skeleton(source: Path, weights: Mapping[str, Tensor]) -> PreTrainedModel | None:
    """Returns the model of a checkpoint on the meta device; None if its weight names cannot be checked.

    They cannot be checked if custom code outside of transformers defines the model's class, or if the model is
    quantized.

    Args:
        source: the folder of the checkpoint.
        weights: the weights of the checkpoint, by name.

    Shapes:
        weights: any.

    Raises:
        CheckpointError: FG611 if the configuration is damaged; FG612 if the configuration names no class, or if the
            weights do not fit the class.
    """
    try:
        facts = json.loads(read_small_file(source / CONFIG))
        # `auto_map` names code in the folder; a quantized model renames its weights when it is loaded.
        if "auto_map" in facts or "quantization_config" in facts:
            return None
        name = str((facts.get("architectures") or [""])[0])
        kind = getattr(transformers, name, None)
        if facts.get("architectures") and not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
            return None
        config = CONFIG_MAPPING[facts["model_type"]]
        # A configuration with a billion layers would take all memory even on the meta device.
        _refuse_layers(facts, len(weights))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise malformed_file(
            source / CONFIG, f"it is not the configuration of a model ({type(error).__name__}: {error!s:.80})"
        ) from None
    if not isinstance(kind, type):
        raise _not_of_a_class(source, "its configuration names no class", _GO_ON)
    try:
        model = model_on_meta(kind, config.from_dict(facts))
    except Exception as error:  # noqa: BLE001 - the class comes from a file and may raise anything
        raise malformed_file(source / CONFIG, f"{name} cannot be built from it ({error!s:.80})") from None
    _refuse_others(source, model, weights)
    return model


def _refuse_layers(facts: Mapping[str, Any], count: int) -> None:
    for name, value in facts.items():
        if _LAYERS.search(name) and isinstance(value, int) and value > count:
            raise ValueError(f"{name} is {value}, and there are {count} weights")


def _refuse_others(source: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    state, kind = model.state_dict(), class_name(model)
    with CheckpointReader(source, sections=(MODEL, EXTRA_STATE)) as saved:
        # `weights` has lost the prefix of torch.compile by now; the reader's names still have it.
        known = {*weights, *(name.removeprefix(_COMPILED) for name in (*saved.aliases, *saved.extra))}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    # A tied weight may be stored under one of its names only.
    expected = [name for name in state if name in known or name not in tied]
    if reason := weight_name_mismatch(kind, expected, sorted(known)):
        raise _not_of_a_class(source, f"its weights do not match its configuration: {reason}", _GO_ON)
    for name, tensor in weights.items():
        # `from_pretrained` would replace a weight of another shape by random numbers, with a warning only.
        if tensor.shape != state[name].shape:
            what = f"{name!r:.80} has shape {tuple(tensor.shape)}, and that of {kind} has {tuple(state[name].shape)}"
            raise _not_of_a_class(source, what, _GO_ON)


def _not_of_a_class(source: Path, what: str, hint: str) -> CheckpointError:
    return CheckpointError(
        f"the model of the checkpoint {str(source)!r} cannot be exported for from_pretrained: {what}",
        code="FG612",
        hint=hint,
    )


def _content(file: Path, dtype: str | None) -> Iterator[Bytes]:
    if dtype is not None:
        # The configuration names the type of the weights, so it changes with them.
        facts = json.loads(file.read_bytes())
        yield (json.dumps({**facts, "dtype": dtype}, indent=2, sort_keys=True) + "\n").encode()
        return
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            yield piece
