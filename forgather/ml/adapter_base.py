"""The base model of an adapter: its name and the digest of its weights, and which weights a checkpoint leaves out.

A checkpoint of an adapted model keeps the weights of the adapter only. `describe_base` computes the name and the digest
of the base model before the adapter is put into it; `note_base` and `base_of` keep them with the model, and a file in
the checkpoint records them. `names_of_base` returns the frozen weights, which are the same in every checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from forgather.errors import CheckpointError, first_line
from forgather.ml.checkpoint.files import ADAPTER, ADAPTER_CONFIG, BASE_MODEL, json_bytes
from forgather.ml.checkpoint.manifest import malformed_file
from forgather.ml.checkpoint.saved_model import HeldWeights, unreadable_model

_ATTRIBUTE = "_forgather_base_model"
_PREFIX, _LAYER = "base_model.model.", ".base_layer."
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The name and the weights of a base model.

    Args:
        name: the name on the Hub or the folder that the model was loaded from; "" if it was not loaded.
        digest: the digest of its weights; "" if it is not known.
    """

    name: str = ""
    digest: str = ""

    def is_known_to_differ(self, other: BaseModel) -> bool:
        """Returns whether two base models differ: by their digests if both are known, and by their names otherwise."""
        if self.digest and other.digest:
            return self.digest != other.digest
        return bool(self.name and other.name) and _resolved(self.name) != _resolved(other.name)

    def __str__(self) -> str:
        name = repr(self.name) if self.name else "a model without a name"
        return f"{name} (digest {self.digest[:12]})" if self.digest else name


def _resolved(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name.rstrip("/")


def describe_base(model: nn.Module) -> BaseModel:
    """Returns the name and the digest of a model.

    The digest is not known if the weights have no values, or cannot be read as bytes.

    Args:
        model: the base model, or a model of peft. The weights of its adapters are not part of the digest.

    Example:
        >>> describe_base(nn.Linear(2, 2).to("meta"))
        BaseModel(name='', digest='')
    """
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or ""
    hasher = xxhash.xxh3_128()
    left_out = names_of_adapter(model)
    found = {_plain(key): value for key, value in model.state_dict().items() if key not in left_out}
    for key in sorted(found):
        value = found[key]
        if not isinstance(value, Tensor) or value.is_meta or isinstance(value, FakeTensor):
            return BaseModel(name=name)
        hasher.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        try:
            whole = value.detach().cpu().contiguous().reshape(-1)
            hasher.update(whole.view(torch.uint8).numpy().tobytes())
        except (RuntimeError, NotImplementedError, TypeError):
            # A quantized weight of several tensors cannot be viewed as bytes; the name is compared then.
            return BaseModel(name=name)
    return BaseModel(name=name, digest=hasher.hexdigest())


def _plain(name: str) -> str:
    for part in (".original_module.", ".token_adapter.base_layer.", _LAYER):
        name = name.replace(part, ".")
    return name.removeprefix(_PREFIX)


def note_base(model: nn.Module, base: BaseModel) -> None:
    """Keeps the description of the base model with an adapted model."""
    # Outside of the modules and parameters: peft passes unknown names on to the base model when they are read.
    vars(model)[_ATTRIBUTE] = base


def base_of(model: nn.Module) -> BaseModel | None:
    """Returns the description that `note_base` kept; None if the model has none."""
    found = getattr(getattr(model, "stands_for", model), "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, BaseModel) else None


def is_peft_model(model: nn.Module) -> bool:
    """Returns whether a model is one of peft that has an adapter of tuned layers."""
    peft = sys.modules.get("peft")  # a model of peft exists only if peft is imported, which takes seconds
    model = getattr(model, "stands_for", model)
    return peft is not None and isinstance(model, peft.PeftModel) and hasattr(model.base_model, "prefix")


def names_of_adapter(model: nn.Module) -> frozenset[str]:
    """Returns the names of the adapter's weights in the state of a model; empty for a model without an adapter."""
    if not is_peft_model(model):
        return frozenset()
    prefix: str = model.base_model.prefix  # type: ignore[union-attr, assignment]
    return frozenset(
        name
        for name in model.state_dict()
        if prefix in name or ".modules_to_save." in name or ".token_adapter.trainable_tokens_" in name
    )


def names_of_base(model: nn.Module, names: Iterable[str] | None = None) -> frozenset[str]:
    """Returns the names of the weights that a checkpoint leaves out: the frozen weights of an adapted base model.

    What belongs to a quantized weight, such as its scales, is left out with it. Buffers stay in the checkpoint, because
    training may change them.

    Args:
        model: the whole model; its weights may be on the meta device.
        names: the names to choose from; None for those in the state of the model. On the meta device, a quantized
            weight has no entries beside itself.
    """
    if base_of(model) is None:
        return frozenset()
    own = names_of_adapter(model)
    state = model.state_dict(keep_vars=True)
    weights = {name for name, value in state.items() if isinstance(value, nn.Parameter)}
    frozen = {name for name in weights - own if not state[name].requires_grad}
    kept = {*own, *(weights - frozen), *(name for name, _ in model.named_buffers())}
    layers = {name.rpartition(".")[0] for name in frozen}

    def is_left_out(name: str) -> bool:
        """Returns whether an entry is a frozen weight, or belongs to one that is quantized."""
        if name in frozen:
            return True
        if name in kept or name.endswith(_EXTRA_STATE):
            return False
        parts = name.split(".")
        # `weight.absmax` belongs to a weight of 4 bits, and `SCB` beside the weight to one of 8 bits.
        of_weight = any(".".join(parts[:end]) in frozen for end in range(1, len(parts)))
        return of_weight or name.rpartition(".")[0] in layers

    return frozenset(filter(is_left_out, state if names is None else names))


def stored_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a state that checkpoints keep: all but the frozen weights of an adapter's base model.

    Args:
        model: the whole model.
        state: the state of the model or of a part of it, by the names of the whole model.
    """
    left_out = names_of_base(model, state)
    return {name: value for name, value in state.items() if name not in left_out}


def adapter_files(model: nn.Module) -> dict[str, bytes]:
    """Returns the files that describe an adapter, by name: its configuration, and the name of the base model.

    Args:
        model: the model; the result is empty if it has no adapter.
    """
    model = getattr(model, "stands_for", model)
    base = base_of(model)
    if base is None:
        return {}
    active: Any = model.active_adapters
    config: Any = model.peft_config
    facts = {**config[active[0]].to_dict(), "inference_mode": True}
    # A set has another order in each process, and the files of equal runs are equal.
    facts = {name: sorted(value) if isinstance(value, set) else value for name, value in facts.items()}
    return {ADAPTER_CONFIG: json_bytes(facts), BASE_MODEL: json_bytes(asdict(base))}


def read_base(folder: Path) -> BaseModel | None:
    """Returns the base model that a checkpoint or the folder of an adapter names; None if it has no such file.

    Args:
        folder: the folder of a checkpoint or of a trained adapter.

    Raises:
        CheckpointError: FG611 if the file is damaged: the base model could not be compared.
    """
    try:
        found = json.loads((folder / BASE_MODEL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise malformed_file(folder / BASE_MODEL, f"it cannot be read ({error!s:.80})") from None
    if not isinstance(found, Mapping) or not all(isinstance(found.get(key), str) for key in ("name", "digest")):
        raise malformed_file(folder / BASE_MODEL, "it has no name and no digest of a base model")
    return BaseModel(name=found["name"], digest=found["digest"])


def read_saved_adapter(folder: Path, model: nn.Module) -> HeldWeights:
    """Returns a reader of the adapter that a run has saved, with the names that its weights have in the model.

    Args:
        folder: the folder with the files of the adapter.
        model: a model with the same adapter, whose weights are not read. For a proxy with the attribute `stands_for`,
            the represented model counts.

    Raises:
        CheckpointError: FG489 if the folder does not contain all weights of the adapter; FG906 if it names another
            base model.
    """
    from peft import get_peft_model_state_dict

    model = getattr(model, "stands_for", model)
    refuse_checkpoint_of_another_base(folder, model)
    state = model.state_dict(keep_vars=True)
    marks = {name: torch.empty(0) for name in state}
    names = {id(mark): name for name, mark in marks.items()}
    # peft knows under which name it writes a weight. The embeddings of a resized vocabulary, which it may write too,
    # belong to the base model; to ask for them could mean to ask the Hub.
    kept = get_peft_model_state_dict(model, state_dict=marks, save_embedding_layers=False)
    written = {key: names[id(mark)] for key, mark in kept.items()}
    try:
        found = load_file(folder / ADAPTER)
    except (OSError, SafetensorError) as error:
        raise unreadable_model(folder, first_line(error)[:200]) from error
    if lacking := sorted(written.keys() - found.keys()):
        raise unreadable_model(folder, f"{lacking[0]!r:.80} is missing in {ADAPTER}")
    # A tied weight, such as the trained rows of an embedding that is the output layer too, is written once.
    by_weight = {id(state[name]): found[key] for key, name in written.items()}
    return HeldWeights(folder, {name: by_weight[id(value)] for name, value in state.items() if id(value) in by_weight})


def refuse_checkpoint_of_another_base(folder: Path, model: nn.Module) -> None:
    """Raises an error if the adapter in a checkpoint was trained on another base model.

    Args:
        folder: the folder of a verified checkpoint.
        model: the model of this run.

    Raises:
        CheckpointError: FG906 if the base models differ.
    """
    theirs, ours = read_base(folder), base_of(model)
    if theirs is not None and ours is not None and theirs.is_known_to_differ(ours):
        raise CheckpointError(
            f"the checkpoint holds an adapter of {theirs}, and the base model of this run is {ours}",
            code="FG906",
            hint="resume with the base model, the seed and the dtype that the run began with",
        )
