"""Writes the trained model as a folder in Hugging Face layout, and checks that a folder is writable.

A model that is not a transformers model and has no `save_pretrained` is written as `model.safetensors` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from forgather.errors import TrainingError
from forgather.ml.adapter_base import adapter_files, base_of
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import REFERENCE_MODEL, json_bytes
from forgather.ml.checkpoint.hf_layout import load_mismatch, weight_files
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.checkpoint.spilled import SpilledTensors
from forgather.ml.checkpoint.storage import LocalStorage, Storage, make_folders
from forgather.ml.hub import hub_access
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.log import get_logger
from forgather.ml.trainer.snapshot import described_files, files_of_self_saving_model, write_weights

_log = get_logger(__name__)


def check_writable(storage: Storage, folder: Path) -> None:
    """Creates a folder, and checks that files can be created in it.

    Args:
        storage: the object through which files are written and removed.
        folder: the folder to create and to check.

    Raises:
        TrainingError: FG817 if the folder or a file in it cannot be created.
    """
    probe = folder / ".write-test"  # a fixed name: a file that a killed process left is removed by the next one
    try:
        make_folders(storage, folder)
        storage.create(probe).close()
        storage.remove_file(probe)
    except OSError as error:
        raise _not_writable(folder, error) from None


def spill_place(storage: Storage, folder: Path) -> SpilledTensors | None:
    """Returns the place of the weights of a model that is about to be written; None to keep them in memory.

    Args:
        storage: the object through which files are written. Only the local file system has a place for weights.
        folder: the folder of the model, which is created if needed.
    """
    if not isinstance(storage, LocalStorage):
        return None
    # A folder that cannot be made is reported by `check_writable`, on all ranks.
    with suppress(OSError):
        make_folders(storage, folder)
        return SpilledTensors(folder)
    return None


def _not_writable(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"output_dir {str(folder)!r} cannot be written to: {getattr(error, 'strerror', None) or error}",
        code="FG817",
        hint="give another output_dir, free space there, or change its permissions",
    )


def export_model(
    storage: Storage,
    model: nn.Module,
    weights: Mapping[str, Any],
    folder: Path,
    processing_class: Any,
    *,
    reference: str | None = None,
) -> None:
    """Writes a trained model: weights, configuration and tokenizer, in the layout that `from_pretrained` reads.

    Two kinds of models are written as `model.safetensors` without a model configuration: those that are not of
    transformers and have no `save_pretrained`, and those whose weights do not match their class. With a configuration,
    `from_pretrained` would load such a model with random weights. An older model in the folder is replaced only when
    the new one is completely written and synced, see `write_model`.

    Args:
        storage: the object through which files are written and removed.
        model: the model whose class and configuration are written. For a proxy with the attribute `stands_for`, those
            of the represented model are written.
        weights: the complete (not sharded) tensors, by name.
        folder: the folder of the model, which is created if needed.
        processing_class: the tokenizer or processor, or None.
        reference: the digest of the reference that the loss compared the model with; None for no reference.

    Raises:
        TrainingError: FG817 if the folder cannot be written to.
    """
    # With pipeline parallelism the strategy holds a proxy; class and configuration are those of the whole model.
    model = getattr(model, "stands_for", model)
    check_writable(storage, folder)
    reason = load_mismatch(model)
    # An adapted model is written although its state has other names: only its adapters are saved, in peft's layout.
    is_adapted = bool(getattr(model, "_hf_peft_config_loaded", False))
    if reason is not None and isinstance(model, PreTrainedModel) and not is_adapted:
        _log.warning("the model in %s is written without its configuration, and cannot be loaded: %s", folder, reason)

    def fill(draft: Draft) -> None:
        """Writes all files of the model."""
        if isinstance(model, PreTrainedModel) and (reason is None or is_adapted):
            with without_progress_bars():
                weight_files(model, weights).write(draft)
                texts = described_files(model, processing_class)
        elif not isinstance(model, PreTrainedModel) and callable(getattr(model, "save_pretrained", None)):
            base = base_of(model)
            # peft looks up the configuration of a base model that is not a folder, and would wait for the Hub.
            with hub_access() if base is not None and base.name and not Path(base.name).is_dir() else nullcontext():
                texts = files_of_self_saving_model(model, weights, processing_class)
        else:
            write_weights(draft, weights)
            texts = described_files(model, processing_class, is_loadable=False)
        if reference is not None:
            texts = texts | {REFERENCE_MODEL: json_bytes({"digest": reference})}
        for name, content in (texts | adapter_files(model)).items():
            draft.write(name, [content])

    try:
        write_model(storage, folder, fill)
    except OSError as error:
        raise _not_writable(folder, error) from error
