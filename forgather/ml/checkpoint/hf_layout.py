"""The weights of a model as `save_pretrained` writes them: which tensors, under which names, in which files.

Takes a model and its weights; gives tensors by file. Keeps true: what transformers leaves out (tied copies, keys that
it does not save) is left out, what it converts back to the format of the hub is converted back; nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import ADAPTER, WEIGHTS, WEIGHTS_INDEX
from forgather.ml.checkpoint.tensor_file import file_chunks

SHARD_SIZE = "50GB"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a model's weights.

    Args:
        tensors: by file and by name in it.
        texts: the index, where there are several files.
        metadata: texts that lie in each file.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, draft: Draft, through: Callable[[str, Any], Any] = lambda name, chunks: chunks) -> None:
        """Writes the files; `through(name, chunks)` gives the chunks on."""
        for name, tensors in self.tensors.items():
            draft.write(name, through(name, file_chunks(tensors, self.metadata)))
        for name, text in self.texts.items():
            draft.write(name, through(name, [text]))


def layout_of(model: PreTrainedModel, weights: Mapping[str, Any], *, shard_size: str | int = SHARD_SIZE) -> Layout:
    """Returns the files that `save_pretrained` would write.

    Args:
        model: tells what is tied, left out and converted; its own weights are not looked at.
        weights: by name, whole; what several names share is one tensor.
        shard_size: of one file at most; a larger tensor has a file of its own.

    Source:
        `transformers.PreTrainedModel.save_pretrained`, without what writes, and without models that are offloaded.
    """
    state, metadata = dict(weights), {}
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        own, metadata = quantizer.get_state_dict_and_metadata(model)
        state = state if own is None else dict(own)
    has_adapter = bool(getattr(model, "_hf_peft_config_loaded", False))
    if has_adapter:
        adapter = model.get_adapter_state_dict(state_dict=state)
        state = {f"base_model.model.{name}": value for name, value in adapter.items()}
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    if not has_adapter:
        state = revert_weight_conversion(model, state)
    return split(
        state,
        name=ADAPTER if has_adapter else WEIGHTS,
        shard_size=shard_size,
        facts={"total_parameters": model.num_parameters()},
        metadata=metadata,
    )


def split(
    state: Mapping[str, Tensor],
    *,
    name: str = WEIGHTS,
    shard_size: str | int = SHARD_SIZE,
    facts: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Returns tensors in files of at most `shard_size`, as the hub names them.

    Args:
        state: by name; no two share memory.
        name: of the file, where one is enough.
        shard_size: in bytes, or as "5GB".
        facts: what the index says beside the size.
        metadata: texts that lie in each file.
    """
    plan = split_torch_state_dict_into_shards(
        dict(state), filename_pattern=name.replace(".safetensors", "{suffix}.safetensors"), max_shard_size=shard_size
    )
    tensors = {file: {key: state[key] for key in keys} for file, keys in plan.filename_to_tensors.items()}
    texts: dict[str, bytes] = {}
    if plan.is_sharded:
        index = {"metadata": {**(facts or {}), **plan.metadata}, "weight_map": plan.tensor_to_filename}
        texts[WEIGHTS_INDEX] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return Layout(tensors, texts, metadata or {})
