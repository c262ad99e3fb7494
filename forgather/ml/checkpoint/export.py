"""Export of a checkpoint's model as a Hugging Face folder (`fgcli ckpt export`).

The model of a checkpoint is written to a new folder in the layout of `save_pretrained`, with the SHA-256 of each file.
The weights are verified against the manifest before they are read. Files get their final names in the new folder only
when all of them are complete. Custom code that the configuration refers to (`auto_map`) is never run.
"""

from __future__ import annotations

import dataclasses
import hashlib
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
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import (
    ADAPTER_CONFIG,
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
    read_manifest,
    read_small_file,
)
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.checkpoint.reader import CheckpointReader, whole_weights
from forgather.ml.checkpoint.storage import Bytes, LocalStorage, Storage
from forgather.ml.model_class import class_name

SUMS = "SHA256SUMS"
_OF_THE_RUN = (INDEX, TRAINER_STATE, TRAINING_ARGS, MANIFEST)
_STATE_OF_THE_RUN = (OPTIMIZER, TRAINING_STATE, f"{CUSTOM}/")
_PIECE = 1 << 22
_COMPILED, _OF_PEFT = "_orig_mod.", "base_model.model."
"""The prefixes that `torch.compile` and peft add to the weight names of the model that they wrap."""
_LAYERS = re.compile(r"layers?$|^depth$")
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
    other_files = [name for name in manifest.files if not _is_of_the_run(name) and not _is_of_weights(name)]
    # The arguments are checked first: reading and hashing a large checkpoint takes minutes.
    shard_size = _bytes_of(max_shard_size)
    _refuse_place(source, into)
    _refuse_changed(source, manifest)
    layout = _weight_files(source, manifest, _in_type(whole_weights(source), dtype), shard_size)
    sums = _Sums()

    def fill(draft: Draft) -> None:
        layout.write(draft, sums.through)
        for name in other_files:
            draft.write(name, sums.through(name, _content(source / name, dtype if name == CONFIG else None)))
        lines = [f"{sums.found[name]}  {name}\n" for name in sorted(sums.found)]
        draft.write(SUMS, ["".join(lines).encode()])

    try:
        written = write_model(storage or LocalStorage(), into, fill)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _cannot(into, f"cannot be written: {reason}", "free space, or name another folder") from error
    return {name: {"bytes": written[name].size, "sha256": sums.found[name]} for name in sorted(sums.found)}


def _is_of_the_run(name: str) -> bool:
    return name in _OF_THE_RUN or name.startswith(_STATE_OF_THE_RUN)


def _is_of_weights(name: str) -> bool:
    return name.startswith((MODEL, SLICES)) and ".safetensors" in name and not name.startswith(EXTRA_STATE)


def _refuse_changed(source: Path, manifest: Manifest) -> None:
    """Raises an error for the first file of the model that is changed or missing."""
    # Optimizer and training state may be missing and are most of the bytes; the model does not need them.
    files = {name: fact for name, fact in manifest.files.items() if not name.startswith(_STATE_OF_THE_RUN)}
    for error in changed_files(source, dataclasses.replace(manifest, files=files)):
        raise error


def _refuse_place(source: Path, into: Path) -> None:
    if into.resolve().is_relative_to(source.resolve()):
        raise _cannot(into, "is inside of the checkpoint", "name another folder")
    if into.exists() and not into.is_dir():
        raise _cannot(into, "is a file", "name a folder")
    if into.is_dir() and any(into.iterdir()):
        raise _cannot(into, "is not empty", "name a folder that does not exist yet")


def _cannot(into: Path, why: str, hint: str) -> CheckpointError:
    return CheckpointError(f"the model cannot be exported: {str(into)!r} {why}", code="FG677", hint=hint)


def _in_type(weights: Iterable[tuple[str, Tensor]], dtype: str | None) -> dict[str, Tensor]:
    wanted = None if dtype is None else getattr(torch, dtype)
    return {
        name.removeprefix(_COMPILED): tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor
        for name, tensor in weights
    }


def _bytes_of(size: str | int) -> int:
    # Powers of 1000, as huggingface_hub reads the same notation.
    found = re.fullmatch(r"([0-9]{1,12}(?:[.][0-9]{1,12})?) *([KMGT])B", str(size).strip().upper())
    number = int(float(found[1]) * 1000 ** (1 + "KMGT".index(found[2]))) if found else size
    if not isinstance(number, int) or number < 1:
        raise CheckpointError(
            f"the model cannot be exported: {size!r:.40} is not a file size",
            code="FG677",
            hint="give a number and KB, MB, GB or TB, as in --max-shard-size 5GB",
        )
    return number


def _weight_files(source: Path, manifest: Manifest, weights: Mapping[str, Tensor], shard_size: int) -> WeightFiles:
    # A checkpoint of a peft model has base weights and adapters under peft's names, which no class can load.
    if ADAPTER_CONFIG in manifest.files or any(name.startswith(_OF_PEFT) or ".lora_" in name for name in weights):
        raise _not_of_a_class(
            source,
            "it holds adapters",
            "a run writes its adapters into output_dir when it ends: resume from the checkpoint, with max_steps at its "
            "step to export them unchanged",
        )
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


class _Sums:
    """Computes the SHA-256 digests of files while they are written."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def through(self, name: str, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        """Yields the chunks of a file unchanged, and stores the digest of the file under its name in `found`."""
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            yield chunk
        self.found[name] = digest.hexdigest()
