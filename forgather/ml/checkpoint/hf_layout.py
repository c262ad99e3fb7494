"""The Hugging Face layout of a model's weights: which tensors, under which names, in which files.

Takes a model and its weights; gives the tensors of each file. Weights that `save_pretrained` leaves out (tied weights,
`_keys_to_ignore_on_save`) are left out, and names that transformers converts on loading are converted back to those of
the hub. Only `Layout.write` writes.
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
from forgather.ml.checkpoint.state import file_chunks

SHARD_SIZE = "50GB"


@dataclass(frozen=True, slots=True)
class Layout:
    """The weight files of a model.

    Args:
        tensors: by file name, then by tensor name.
        texts: the index file, when there are several weight files.
        metadata: strings that are stored in the header of each file.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def write(self, draft: Draft, through: Callable[[str, Any], Any] = lambda name, chunks: chunks) -> None:
        """Writes the files into a draft.

        Args:
            draft: receives the files.
            through: called as `through(name, chunks)`; returns the chunks that are written. An export computes SHA-256
                there.
        """
        for name, tensors in self.tensors.items():
            draft.write(name, through(name, file_chunks(tensors, self.metadata)))
        for name, text in self.texts.items():
            draft.write(name, through(name, [text]))


def layout_of(model: PreTrainedModel, weights: Mapping[str, Any], *, shard_size: str | int = SHARD_SIZE) -> Layout:
    """Returns the files that `save_pretrained` would write.

    Args:
        model: defines which weights are tied, left out or converted; its own weights are not read.
        weights: whole tensors by name; tied names refer to the same tensor.
        shard_size: maximum size of one file, in bytes or as "5GB"; a tensor that is larger gets a file of its own.

    Source:
        `transformers.PreTrainedModel.save_pretrained`, without the writing and without support for offloaded models.
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
    """Returns tensors distributed over files of at most `shard_size`, with the file names of the hub.

    Args:
        state: tensors by name; no two of them share memory.
        name: the file name when one file is enough.
        shard_size: maximum size of one file, in bytes or as "5GB".
        facts: entries of the index next to the total size.
        metadata: strings that are stored in the header of each file.
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
