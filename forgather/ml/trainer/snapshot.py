"""A run at a step boundary, as it is written into a checkpoint.

Takes what a run is made of; gives files of a draft. Keeps true: what is written is what was captured, whatever the run
does meanwhile with anything but its tensors; each process writes its own part.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forgather.ml.checkpoint.folders import Draft
from forgather.ml.checkpoint.state import split_tensors, write_state, write_tensors

WEIGHTS = "model.safetensors"
EXTRA_STATE = "model_extra_state"
TRAINER_STATE = "trainer_state.json"
TRAINING_ARGS = "training_args.json"
TRAINING_STATE = "training_state"
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a checkpoint holds.

    Args:
        step: updates that were done.
        model: weights by name, as they are trained.
        files: small files by name: configuration, tokenizer, state for people.
        optimizer: its state by names of weights; None where the model alone is saved.
        training: schedule, random states, position in the data; None where the model alone is saved.
    """

    step: int
    model: Mapping[str, Tensor]
    files: Mapping[str, bytes]
    optimizer: Mapping[str, Any] | None
    training: Mapping[str, Any] | None

    def write(self, draft: Draft) -> None:
        """Writes everything into a draft."""
        write_weights(draft, self.model)
        for name, content in self.files.items():
            draft.write(name, [content])
        if self.training is not None:
            write_state(draft, OPTIMIZER, self.optimizer)
            write_state(draft, TRAINING_STATE, self.training)


def write_weights(draft: Draft, state: Mapping[str, Any]) -> None:
    """Writes a model's state as `model.safetensors`; tied weights once."""
    tensors, aliases, rest = split_tensors(state)
    metadata = {"aliases": json.dumps(aliases)} if aliases else {}
    write_tensors(draft, WEIGHTS, tensors, metadata)
    if rest:
        write_state(draft, EXTRA_STATE, rest)


def described_files(model: nn.Module, processing_class: Any) -> dict[str, bytes]:
    """Returns the files that tell what a model is: configurations and tokenizer, as `save_pretrained` writes them."""
    model = getattr(model, "stands_for", model)
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="forgather-described-") as place:
        for part in (_described(model), getattr(model, "generation_config", None), processing_class):
            if callable(save := getattr(part, "save_pretrained", None)):
                save(place)
        for file in sorted(Path(place).rglob("*")):
            if file.is_file():
                files[file.relative_to(place).as_posix()] = file.read_bytes()
    return files


def _described(model: nn.Module) -> Any:
    """Returns the configuration with the class and the type of the weights, as `save_pretrained` writes them."""
    config: Any = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel):
        return config
    config = copy.deepcopy(config)
    # fully_shard puts a class of its own in front of the model's.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config
