"""Writes the trained model as a folder in Hugging Face layout, and checks that a folder is writable.

A model that is neither of transformers nor has `save_pretrained` is written as `model.safetensors` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from forgather.errors import TrainingError
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.hf_layout import load_mismatch, weight_files
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.checkpoint.storage import Storage, make_folders
from forgather.ml.distributed.env import device_for_deepspeed_imports
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.log import get_logger
from forgather.ml.trainer.snapshot import described_files, files_of_self_saving_model, write_weights

_log = get_logger(__name__)


def check_writable(storage: Storage, folder: Path) -> None:
    """Creates a folder and checks that files can be created in it.

    Args:
        storage: does the file operations.
        folder: to check.

    Raises:
        TrainingError: FG817 if nothing can be written.
    """
    probe = folder / ".write-test"  # a fixed name: a file that a killed process left is removed by the next one
    try:
        make_folders(storage, folder)
        storage.create(probe).close()
        storage.remove_file(probe)
    except OSError as error:
        raise _not_writable(folder, error) from None


def _not_writable(folder: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"output_dir {str(folder)!r} cannot be written to: {getattr(error, 'strerror', None) or error}",
        code="FG817",
        hint="give another output_dir, free space there, or change its permissions",
    )


def export_model(
    storage: Storage, model: nn.Module, weights: Mapping[str, Any], folder: Path, processing_class: Any
) -> None:
    """Writes a model for use: weights, configuration and tokenizer, as `from_pretrained` reads them.

    A model that is neither of transformers nor can save itself is written as `model.safetensors`, and so is one whose
    weights are not those of its class. No configuration is written next to them: `from_pretrained` would load the class
    with random weights. Files are written to a draft, synced and moved: an older model stays until the new one is
    complete, see `write_model`.

    Args:
        storage: does the file operations.
        model: gives class and configuration; a proxy with `stands_for` gives those of the model that it represents.
        weights: complete tensors by name.
        folder: created if needed.
        processing_class: tokenizer or processor; None for none.

    Raises:
        TrainingError: FG817 if nothing can be written into the folder.
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
        if isinstance(model, PreTrainedModel) and (reason is None or is_adapted):
            # Libraries would print progress bars, and on several processes use the default device instead of this
            # process's.
            with without_progress_bars(), device_for_deepspeed_imports():
                weight_files(model, weights).write(draft)
                texts = described_files(model, processing_class)
        elif not isinstance(model, PreTrainedModel) and callable(getattr(model, "save_pretrained", None)):
            texts = files_of_self_saving_model(model, weights, processing_class)
        else:
            write_weights(draft, weights)
            texts = described_files(model, processing_class, is_loadable=False)
        for name, content in texts.items():
            draft.write(name, [content])

    try:
        write_model(storage, folder, fill)
    except OSError as error:
        raise _not_writable(folder, error) from error
