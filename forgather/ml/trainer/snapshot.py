"""A run at a step boundary, as it is written into a checkpoint.

Takes what a run is made of; gives a `Snapshot`, and that gives files of a draft. Keeps true: what is written is what
was captured, whatever the run does meanwhile with anything but its tensors; each process writes its own part, and what
there is to agree on was agreed on before.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import EXTRA_STATE, TRAINING_STATE, WEIGHTS, as_json
from forgather.ml.checkpoint.save_plan import Shards
from forgather.ml.checkpoint.state import packed, split_tensors, write_state, write_tensors
from forgather.ml.checkpoint.tensor_file import file_chunks
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.model_class import class_name
from forgather.redaction import hide_known, known_hidden

_log = get_logger(__name__)

_VOCABULARIES = frozenset(("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one process writes of a checkpoint. Writing it asks no other process for anything.

    Args:
        step: updates that were done.
        tensors: by file (safetensors) and by key in it; they may lie on a device, and belong to the run.
        texts: what else is written, by file.
        files: what is copied, by file: where it lies.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes]
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of everything, but for the headers of files."""
        held = [tensor for tensors in self.tensors.values() for tensor in tensors.values()]
        return sum(tensor.nbytes for tensor in held) + sum(map(len, self.texts.values()))

    def write(self, draft: Draft) -> None:
        """Writes everything into a draft."""
        for name, tensors in self.tensors.items():
            draft.write(name, file_chunks(tensors))
        for name, content in self.texts.items():
            draft.write(name, [content])
        for name, file in self.files.items():
            with file.open("rb", buffering=0) as stream:
                draft.write(name, iter(functools.partial(stream.read, 8 << 20), b""))


def snapshot(
    step: int, shards: Shards, texts: Mapping[str, bytes], training: Mapping[str, Any] | None, *, is_writer: bool
) -> Snapshot:
    """Returns what this process writes of a checkpoint; every process calls it.

    Args:
        step: updates that were done.
        shards: what this process writes of the state.
        texts: small files by name: configuration, tokenizer, state for people.
        training: schedule, random states, position in the data; None where the model alone is saved.
        is_writer: whether this process writes what belongs to all.

    Raises:
        CheckpointError: FG606, on every process, where one of them holds a value that no file can.
    """
    if training is None:
        return Snapshot(step=step, tensors=shards.tensors, texts={**shards.texts, **texts} if is_writer else {})
    # Packed by all, though one writes it: what cannot be held is told on each of them.
    plain, beside = collectives.together(lambda: packed(training, TRAINING_STATE))
    if not is_writer:
        return Snapshot(step=step, tensors=shards.tensors, texts={})
    return Snapshot(
        step=step,
        tensors={**shards.tensors, f"{TRAINING_STATE}.safetensors": beside},
        texts={
            **shards.texts,
            **texts,
            f"{TRAINING_STATE}.json": without_secrets_of(f"{TRAINING_STATE}.json", as_json(plain)),
        },
    )


def write_weights(draft: Draft, state: Mapping[str, Any]) -> None:
    """Writes a model's state as `model.safetensors`; tied weights once."""
    tensors, aliases, rest = split_tensors(state)
    metadata = {"aliases": json.dumps(aliases)} if aliases else {}
    write_tensors(draft, WEIGHTS, tensors, metadata)
    if rest:
        write_state(draft, EXTRA_STATE, rest)


def described_files(model: nn.Module, processing_class: Any, *, is_loadable: bool = True) -> dict[str, bytes]:
    """Returns the files that tell what a model is: configurations and tokenizer, as `save_pretrained` writes them.

    Args:
        model: tells class and configuration.
        processing_class: tokenizer or processor; None for none.
        is_loadable: whether `from_pretrained` reads the weights beside; where it does not, no file says which class
            they are of.
    """
    model = getattr(model, "stands_for", model)
    parts = [getattr(model, "generation_config", None), processing_class]
    if is_loadable and isinstance(model, PreTrainedModel):
        config = _described(model)
        parts = [_Code(model, config), *_configs(model, config, parts[0]), processing_class]
    return _saved_files(parts)


def self_described_files(model: nn.Module, weights: Mapping[str, Any], processing_class: Any) -> dict[str, bytes]:
    """Returns the files of a model that is none of transformers and saves itself, weights and all, and its tokenizer.

    Args:
        model: has `save_pretrained`.
        weights: by name, whole; adapters of peft are taken from them.
        processing_class: tokenizer or processor; None for none.
    """
    peft = sys.modules.get("peft")
    settings = {"state_dict": dict(weights)} if peft and isinstance(model, peft.PeftModel) else {}
    return _saved_files([model], **settings) | _saved_files([processing_class])


def _saved_files(parts: Iterable[Any], **settings: Any) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="forgather-described-") as place:
        for part in parts:
            if callable(save := getattr(part, "save_pretrained", None)):
                save(place, **settings)
        for file in sorted(Path(place).rglob("*")):
            if file.is_file():
                files[file.relative_to(place).as_posix()] = without_secrets_of(file.name, file.read_bytes())
    return files


def without_secrets_of(name: str, content: bytes) -> bytes:
    """Returns a file without the secrets that names made such: a model works by the others, which stay.

    So do keys, numbers and the words of a vocabulary, which may be those of a secret: `test` is a token, too.
    """
    if name in _VOCABULARIES or not name.endswith((".json", ".py", ".md", ".txt")):
        return content
    text = content.decode("utf-8", "surrogateescape")
    if hide_known(text, is_named=True) == text:
        return content
    shown = _json_without_secrets(text) if name.endswith(".json") else hide_known(text, is_named=True, keeps_words=True)
    if shown == text:
        return content
    _log.warning("%s is written without the secret that it holds", name)
    return shown.encode("utf-8", "surrogateescape")


def _json_without_secrets(text: str) -> str:
    data = json.loads(text)
    shown = known_hidden(data, is_named=True)
    return text if shown == data else json.dumps(shown, indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class _Code:
    """The Python files of a model whose class is none of the library."""

    model: PreTrainedModel
    config: Any

    def save_pretrained(self, place: str) -> None:
        if self.model.is_remote_code():
            custom_object_save(self.model, place, config=self.config)


def _configs(model: PreTrainedModel, config: Any, generation_config: Any) -> list[Any]:
    found = [generation_config] if model.can_generate() else []
    if not getattr(model, "_hf_peft_config_loaded", False):
        return [config, *found]
    return [*found, model.peft_config[model.active_adapters()[0]]]


def _described(model: PreTrainedModel) -> Any:
    """Returns the configuration with the class and the type of the weights, as `save_pretrained` writes them."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [class_name(model)]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config
