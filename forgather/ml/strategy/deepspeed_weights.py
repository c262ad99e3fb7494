"""The first weights of ZeRO stage 3, which lie in slices on all processes from the beginning.

Takes a model without memory and its initial weights; gives the model with the weights that DeepSpeed's engine takes as
they are. Keeps true: no process and no device holds more than one weight whole; weights stay the objects that an
optimizer was made of, and those that modules share stay shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.strategy.initial_weights import InitialWeights
from forgather.ml.strategy.meta_model import put, tensors_of


def take_over(
    model: nn.Module, initial: InitialWeights, deepspeed: Any, settings: Mapping[str, Any], device: torch.device
) -> None:
    """Gives every weight its value and slices it, one after the other, and every buffer its value; collective.

    Args:
        model: with its tensors on the meta device.
        initial: the weights.
        deepspeed: the module.
        settings: the config of the engine.
        device: where this process computes.
    """
    # As `deepspeed.initialize` does: what slices weights asks DeepSpeed, and not torch, for the processes.
    backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)
    dtype = _computed_in(settings)
    first: Any = None
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for fqn, owner, name, tensor in list(tensors_of(model)):
        if not tensor.is_meta:
            continue
        if not isinstance(tensor, nn.Parameter):
            if id(tensor) not in buffers:
                buffers[id(tensor)] = (tensor, initial.read(fqn).to(device, copy=True))
            put(owner, name, buffers[id(tensor)][1])
        elif not hasattr(tensor, "ds_id"):
            kind = dtype if tensor.is_floating_point() else None
            value = nn.Parameter(initial.read(fqn).to(device, kind, copy=True), requires_grad=tensor.requires_grad)
            value.__dict__.update(vars(tensor))
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
            del value
            if first is None:
                deepspeed.zero.Init(module=nn.ParameterList([tensor]), config_dict_or_path=dict(settings))
                first = tensor
            else:
                first.convert_to_zero_parameters(param_list=[tensor])


def _computed_in(settings: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the type that the engine wants weights in; None for that which they have."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if (settings.get(section) or {}).get("enabled") is True:
            return dtype
    return None
