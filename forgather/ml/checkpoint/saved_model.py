"""Reads the weights of a saved model, as a checkpoint's reader reads those of a checkpoint.

Takes the folder of a model in Hugging Face layout and a model of the same class; gives a `CheckpointReader` with the
names of the model's weights, which may differ from the names in the files. Each strategy then places its own part of
each weight. All weights are in host memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from forgather.errors import CheckpointError, first_line
from forgather.ml.checkpoint.files import MODEL, WEIGHTS
from forgather.ml.checkpoint.reader import CheckpointReader, StoredTensor
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.model_class import user_class
from forgather.ml.random_state import forked_random


class HeldWeights(CheckpointReader):
    """A reader of weights that are in memory.

    Args:
        folder: the folder from which the weights were read, for messages.
        state: the state dict of the model. All names of a tied weight have an entry.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        self.folder = folder
        self._held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.weights = {name: StoredTensor(MODEL, name, value.dtype, value.shape) for name, value in self._held.items()}
        self.aliases: dict[str, str] = {}
        self.extra = {name: value for name, value in state.items() if name not in self._held}
        self.optimizer = None

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry of the state dict of the model.

        Shapes:
            Yields tensors of any shape.
        """
        yield from self._held.items()
        yield from self.extra.items()

    def close(self) -> None:
        """Frees the weights."""
        self._held = {}

    @torch.no_grad()
    def read(self, stored: StoredTensor, into: Tensor) -> None:
        """Copies a weight into another tensor. For a DTensor, only the local shard is copied.

        Args:
            stored: the description of the weight, from this reader.
            into: the tensor to fill, on any device.

        Shapes:
            into: `stored.shape`, which is the global shape of a DTensor.
        """
        whole = self._held[stored.name]
        if isinstance(into, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(into.shape, into.device_mesh, into.placements)
            part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            into.to_local().copy_(whole[part])
        else:
            into.copy_(whole)


def read_saved_model(folder: Path, model: nn.Module) -> HeldWeights:
    """Returns a reader of the model that a run has saved. The random states do not change.

    Args:
        folder: the folder of the model.
        model: a model of the same class, whose weights are not read. For a proxy with the attribute `stands_for`, the
            represented model counts.

    Raises:
        CheckpointError: FG489 if the folder does not contain all weights of the model.
    """
    model = getattr(model, "stands_for", model)
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise unreadable_model(folder, "it holds adapters alone, not a whole model")
    try:
        if not isinstance(model, PreTrainedModel):
            return HeldWeights(folder, load_file(folder / WEIGHTS))
        # Constructors draw initial weights.
        with without_progress_bars(), forked_random(0), torch.device("cpu"):
            loader: Any = user_class(model)
            found, facts = loader.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise unreadable_model(folder, first_line(error)[:200]) from error
    # transformers fills weights that it does not find with random numbers.
    lacking = sorted([*facts["missing_keys"], *map(str, facts["mismatched_keys"])])
    if lacking:
        raise unreadable_model(folder, f"{lacking[0]!r:.80} is missing, or has another shape")
    return HeldWeights(folder, found.state_dict())


def unreadable_model(folder: Path, reason: str) -> CheckpointError:
    """Returns the FG489 error for a saved model that cannot be read.

    Args:
        folder: the folder of the model.
        reason: what is wrong with it.
    """
    return CheckpointError(
        f"the saved model in {str(folder)!r} cannot be read: {reason}",
        code="FG489",
        hint="evaluate a checkpoint instead: --checkpoint last",
    )
