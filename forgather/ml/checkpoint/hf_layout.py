"""The Hugging Face layout of a model's weights: which tensors are stored, under which names, and in which files.

`weight_files` returns the tensors of each file that `save_pretrained` would write. A tied weight is stored under one of
its names, and the weights in `_keys_to_ignore_on_save` are omitted. Weight names that transformers converts on loading
are converted back to those of the hub. Only `WeightFiles.write` writes files.

`load_mismatch` checks whether a model's state dict has the weight names that `from_pretrained` expects. transformers
initializes missing weights with random numbers and only logs a warning, so a folder whose weights have other names must
not look like a model that can be loaded.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import ADAPTER, WEIGHTS, WEIGHTS_INDEX
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.checkpoint.state import file_chunks
from forgather.ml.model_class import class_name, user_class

SHARD_SIZE = "50GB"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a model.

    Args:
        tensors: the tensors, by file name and tensor name.
        texts: the contents of other files, by name: the index file if there are several weight files.
        metadata: the strings that are stored in the header of each weight file.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, draft: Draft, through: Callable[[str, Any], Any] = lambda name, chunks: chunks) -> None:
        """Writes the files into a draft.

        Args:
            draft: the draft into which the files are written.
            through: a function that is called as `through(name, chunks)` and returns the chunks to write. An export
                computes the SHA-256 digest of each file in this function.
        """
        for name, tensors in self.tensors.items():
            draft.write(name, through(name, file_chunks(tensors, self.metadata)))
        for name, text in self.texts.items():
            draft.write(name, through(name, [text]))


def weight_files(
    model: PreTrainedModel, weights: Mapping[str, Any], *, shard_size: str | int = SHARD_SIZE
) -> WeightFiles:
    """Returns the weight files that `save_pretrained` would write.

    Args:
        model: the model, which determines the weights that are tied, omitted or converted. The values of its weights
            are not read.
        weights: the whole (not sharded) tensors by name. All names of a tied weight have the same tensor.
        shard_size: the maximum size of one file, in bytes or as a string such as "5GB". A larger tensor is stored alone
            in one file.

    Source:
        `transformers.PreTrainedModel.save_pretrained`. Difference: no files are written, and offloaded models are not
        supported.
    """
    # A copy, because names are removed from it below.
    state, metadata = dict(weights), {}
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        # A quantizer (bitsandbytes, for example) stores statistics next to the weights and names them itself.
        own, metadata = quantizer.get_state_dict_and_metadata(model)
        state = state if own is None else dict(own)
    has_adapter = bool(getattr(model, "_hf_peft_config_loaded", False))
    if has_adapter:
        adapter = model.get_adapter_state_dict(state_dict=state)
        # peft adds this prefix when it saves, and strips it when it loads.
        state = {f"base_model.model.{name}": value for name, value in adapter.items()}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    # Adapters have names of peft, which transformers does not convert.
    if not has_adapter:
        state = revert_weight_conversion(model, state)
    return split_into_files(
        state,
        name=ADAPTER if has_adapter else WEIGHTS,
        shard_size=shard_size,
        facts={"total_parameters": model.num_parameters()},
        metadata=metadata,
    )


def split_into_files(
    state: Mapping[str, Tensor],
    *,
    name: str = WEIGHTS,
    shard_size: str | int = SHARD_SIZE,
    facts: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WeightFiles:
    """Returns weight files of at most `shard_size` that contain the given tensors, with the file names of the hub.

    Args:
        state: the tensors by name. No two of them share memory.
        name: the name of the file if one file is enough.
        shard_size: the maximum size of one file, in bytes or as a string such as "5GB".
        facts: the entries of the index file in addition to the total size.
        metadata: the strings that are stored in the header of each weight file.

    Shapes:
        state: any.
    """
    plan = split_torch_state_dict_into_shards(
        dict(state), filename_pattern=name.replace(".safetensors", "{suffix}.safetensors"), max_shard_size=shard_size
    )
    tensors = {file: {key: state[key] for key in keys} for file, keys in plan.filename_to_tensors.items()}
    texts: dict[str, bytes] = {}
    if plan.is_sharded:
        index = {"metadata": {**(facts or {}), **plan.metadata}, "weight_map": plan.tensor_to_filename}
        texts[WEIGHTS_INDEX] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return WeightFiles(tensors, texts, metadata or {})


def load_mismatch(model: nn.Module) -> str | None:
    """Returns the reason why `from_pretrained` could not load a model's state dict; None if it could.

    Args:
        model: the model whose state dict is saved. For a proxy with the attribute `stands_for`, the represented model
            is checked.
    """
    # With pipeline parallelism the strategy holds a proxy; class and configuration are those of the whole model.
    model = getattr(model, "stands_for", model)
    if not isinstance(model, PreTrainedModel):
        return f"a {class_name(model)} is not a model of transformers, and may contain one"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "they include adapters"
    # A quantizer renames weights while it loads them, so the names of an unloaded model prove nothing.
    if getattr(model, "hf_quantizer", None) is not None:
        return None
    return _class_mismatch(model)


def _class_mismatch(model: PreTrainedModel) -> str | None:
    kind = user_class(model)
    try:
        # A copy, because a constructor may change the configuration that it is given.
        bare = model_on_meta(kind, copy.deepcopy(model.config))
    except Exception:  # noqa: BLE001 - the border of a user's class: from_pretrained makes it in the same way
        return None
    return weight_name_mismatch(kind.__name__, bare.state_dict().keys(), model.state_dict().keys())


def model_on_meta(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Returns a model on the meta device, which has no values; the states of all random generators do not change.

    Args:
        kind: the model class.
        config: the configuration that is passed to the constructor of the class.
    """
    # Constructors draw initial weights even on the meta device. Those draws must not shift the random numbers of the
    # run.
    before = capture_rng()
    try:
        with torch.device("meta"):
            return kind(config)
    finally:
        restore_rng(before)


def weight_name_mismatch(kind: str, expected: Collection[str], found: Collection[str]) -> str | None:
    """Returns a description of the first weight name that is missing or not expected; None if all names are equal.

    Args:
        kind: the name of the model class, which the description gives.
        expected: the weight names that the class has.
        found: the weight names in the state dict.
    """
    unknown = [name for name in found if name not in expected]
    missing = [name for name in expected if name not in found]
    if not unknown and not missing:
        return None
    name, what = (unknown[0], "is not one of its weights") if unknown else (missing[0], "is missing")
    more = len(unknown) + len(missing) - 1
    return f"they are not those of {kind}: {name!r:.80} {what}" + (f", and {more} more names differ" if more else "")
