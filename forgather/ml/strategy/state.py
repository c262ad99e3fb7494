"""State of a model and an optimizer by the names of the parameters, whole; and back to where it lies.

Takes modules and optimizers whose tensors may be sharded (DTensors); gives whole tensors under the names of the whole
model. Keeps true: the form says nothing of the layout, so what one layout wrote another reads; tensors that several
names share are one tensor; the optimizer is not stepped to find out what its state looks like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from forgather.errors import CheckpointError, nearest


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor as one process would hold it; collective over its mesh where it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    if local.device.type != mesh.device_type:  # offloaded: the group cannot gather where it lies
        local = local.to(mesh.device_type)
    there = DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    whole: Tensor = there.full_tensor()
    return whole


def like_local(whole: Tensor, like: Tensor) -> Tensor:
    """Returns the part of a whole tensor that lies here, in the shape in which `like` (perhaps a DTensor) lies."""
    if not isinstance(like, DTensor):
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


def whole_model_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the state of a model by name, each tensor whole, one at a time; collective."""
    state = model.state_dict(keep_vars=True)
    times = Counter(id(value) for value in state.values())
    shared: dict[int, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            yield name, value
        elif times[id(value)] == 1:
            yield name, whole_tensor(value)
        else:
            if id(value) not in shared:
                shared[id(value)] = whole_tensor(value)
            yield name, shared[id(value)]


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Writes whole tensors into a model that may be sharded, or be a part of the whole one.

    Args:
        model: with its weights where they are to lie; names that the state has beyond its own are left alone.
        state: as `whole_model_state` gives it, perhaps of a larger model.

    Raises:
        CheckpointError: FG605 for a weight that is missing or of another shape.
    """
    extra: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in state:
            raise CheckpointError(
                f"the weights do not fit {type(model).__name__}: there is no {name!r}",
                code="FG605",
                hint=nearest(name, list(state)) or "resume with the model that the checkpoint was written with",
            )
        if not isinstance(value, Tensor):
            extra[name] = state[name]
            continue
        if value.shape != state[name].shape:
            found = tuple(state[name].shape)
            raise CheckpointError(
                f"the weights do not fit {type(model).__name__}: {name!r} has shape {found}, not {tuple(value.shape)}",
                code="FG605",
                hint="resume with the model that the checkpoint was written with",
            )
        write_whole(value, state[name])
    if extra:
        model.load_state_dict(extra, strict=False)


@torch.no_grad()
def write_whole(tensor: Tensor, whole: Tensor) -> None:
    """Writes a whole tensor into one that lies here, as far as it lies here."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.copy_(like_local(whole, tensor))


_OF_THE_LAYOUT = ("fused", "foreach")


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter by its id; the first name of one that is shared."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
    """Returns {"state": {name: {...}}, "param_groups": [{"params": names, ...}]}, whole; collective.

    Args:
        model: tells the names.
        optimizer: of parameters of the model.
        keep: False on a process that only takes part: its tensors are dropped as soon as they are whole.
    """
    names = names_of(model)
    packed = optimizer.state_dict()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    number = [index for group in packed["param_groups"] for index in group["params"]]
    name_of = dict(zip(number, order, strict=True))
    state: dict[str, dict[str, Any]] = {}
    for index in number:
        if index not in packed["state"]:
            continue
        entry: dict[str, Any] = {}
        for key, value in packed["state"][index].items():
            whole = whole_tensor(value) if isinstance(value, Tensor) else value
            if keep:
                entry[key] = whole.cpu() if isinstance(whole, Tensor) else whole
        if keep:
            state[name_of[index]] = entry
    groups = [{**group, "params": [name_of[index] for index in group["params"]]} for group in packed["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Gives an optimizer the state that `whole_optimizer_state` returned, perhaps of a larger model.

    Settings of a group come from the saved group that holds its first parameter, but for those that say how a step is
    computed: one fused operation takes no whole weights beside sliced ones.

    Raises:
        CheckpointError: FG605 for a parameter that the state does not have, or has otherwise.
    """
    names = names_of(model)
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    packed = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, numbers in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        here = [names[id(parameter)] for parameter in group["params"]]
        _refuse_other_parameters(here, saved, optimizer)
        own = {name: numbers[name] for name in ("params", *_OF_THE_LAYOUT) if name in numbers}
        settings = {**numbers, **(saved[here[0]] if here else {}), **own}
        groups.append(settings)
        for index, name, parameter in zip(numbers["params"], here, group["params"], strict=True):
            if name in state["state"]:
                entries[index] = {
                    key: _placed(value, parameter, f"{key} of {name}") for key, value in state["state"][name].items()
                }
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _refuse_other_parameters(here: list[str], saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    missing = [name for name in here if name not in saved]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the optimizer state does not fit {type(optimizer).__name__}: it has no {missing[0]!r}{more}",
            code="FG605",
            hint="resume with the optimizer and the trainable parameters that the checkpoint was written with",
        )


def _placed(value: Any, parameter: nn.Parameter, what: str) -> Any:
    """Returns a value of the state as it belongs beside its parameter."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.ndim == 0:
        return value.clone() if isinstance(value, Tensor) else value
    mesh = parameter.device_mesh
    if value.shape != parameter.shape:  # factored: torch computes it from sharded tensors and keeps it whole
        return DTensor.from_local(value.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    local = like_local(value, parameter).to(parameter.device, copy=True).contiguous()
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
