"""FSDP2 units: modules whose weights are gathered together before the module computes, and freed together afterwards.

The functions take a model (which may be on the meta device) and a `Sharding`. They find the units, shard them, and make
the backward pass recompute their activations. Parameter names do not change. Gradients are summed over replicas, not
averaged. The error about an unknown class lists the classes that the model has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from forgather.errors import DistributedError, nearest
from forgather.ml.activation_checkpointing import CONTAINERS, checkpoint_activations, repeated_blocks
from forgather.ml.adapter_base import is_peft_model
from forgather.ml.log import get_logger
from forgather.ml.strategy.fsdp_config import MixedPrecision, Sharding

_log = get_logger(__name__)

_LISTS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Returns the submodules that become FSDP2 units, inner ones first. The model itself is not in the list.

    Args:
        model: the model to shard.
        sharding: the settings of FSDP2, of which `wrap`, `layers` and `min_num_params` determine the units.

    Raises:
        DistributedError: FG735 if `layers` has a name that is neither a class nor a module of the model.
    """
    if sharding.wrap == "none":
        return []
    if sharding.wrap == "size":
        return _untied_units(model, _large_modules(model, sharding.min_num_params))
    named = set(sharding.layers) or set(getattr(model, "_no_split_modules", None) or ())
    by_name = dict(model.named_modules())
    classes = {type(module).__name__ for module in by_name.values()}
    for name in sharding.layers:
        if name not in classes and name not in by_name:
            raise _no_such_class(name, model)
    chosen = {id(by_name[name]) for name in named - classes if name in by_name}
    found = [
        module
        for module in _inner_first(model)
        if module is not model and (type(module).__name__ in named or id(module) in chosen)
    ]
    return _untied_units(model, found or repeated_blocks(model))


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights of all sharded units of a model.

    Args:
        model: the model, or the part of it on this rank.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shards a model over a mesh in place: each unit first, and then the remaining weights as the root unit.

    Args:
        model: the model to shard.
        units: the units, as returned by `units_of`.
        mesh: the mesh of the ranks that shard or replicate the weights.
        sharding: the settings of FSDP2.
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": (sharding.precision or MixedPrecision()).policy,
        "offload_policy": sharding.offload_policy(mesh.device_type),
    }
    for unit in units:
        fully_shard(unit, reshard_after_forward=sharding.reshard_after_forward, **settings)
    # The backward pass starts with the weights of the root unit. They therefore stay gathered after the forward pass,
    # unless the root is the only unit.
    fully_shard(model, reshard_after_forward=sharding.reshard_after_forward and not units, **settings)
    if is_peft_model(model):
        # peft's `generate` calls the model inside it, and not the forward that gathers the weights of no unit.
        register_fsdp_forward_method(model, "generate")
    for module in [*units, model]:
        # The losses of ranks are shares of one sum, so gradients are summed. A mean that is multiplied by the number of
        # ranks would be rounded if a model computes in a lower precision than that of its weights. Plain sums are
        # requested since gloo has no sum with a factor.
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    for position, unit in enumerate(units):
        following = units[position + 1 : position + 1 + sharding.forward_prefetch]
        if following:
            unit.set_modules_to_forward_prefetch(following)  # type: ignore[operator]
        if sharding.backward_prefetch:
            before = units[max(0, position - sharding.backward_prefetch) : position]
            unit.set_modules_to_backward_prefetch(before[::-1])  # type: ignore[operator]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of a model to a device, because FSDP2 offloads and moves only parameters.

    Args:
        model: the sharded model, or a part of it.
        device: the device that the model computes on.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def checkpoint_units(model: nn.Module, units: list[nn.Module], sharding: Sharding) -> bool:
    """Makes the backward pass recompute the units if the settings request it, and returns whether they do.

    Args:
        model: the model, which is recomputed as a whole if there are no units.
        units: the units, as returned by `units_of`.
        sharding: the settings of FSDP2.
    """
    if sharding.recompute == "none":
        return False
    checkpoint_activations(units or [model], sharding.recompute)
    return True


def _untied_units(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Returns the units except those with a weight that is tied to a module outside the unit.

    The root unit shards the weights of the other units.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    kept = []
    for unit in units:
        inside = {id(module) for module in unit.modules()}
        if all(owners[id(parameter)] <= inside for parameter in unit.parameters()):
            kept.append(unit)
        else:
            _log.info(
                "%s is not sharded as a unit of its own: it has a weight that is tied to another module",
                type(unit).__name__,
            )
    return kept


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _large_modules(model: nn.Module, at_least: int) -> list[nn.Module]:
    """Returns the innermost modules that have at least the given number of parameters.

    Parameters that belong to a unit inside a module are not counted for the module. Modules without children are left
    out: gathering so few weights at a time costs more than it saves.
    """
    found: list[nn.Module] = []

    def left_in(module: nn.Module) -> int:
        """Collects the units in a module; returns the number of its parameters that are in none of them."""
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        children = list(module.children())
        left = own + sum(left_in(child) for child in children)
        # `fully_shard` refuses lists of modules, which have no forward.
        if left >= at_least and children and module is not model and not isinstance(module, _LISTS):
            found.append(module)
            return 0
        return left

    left_in(model)
    return found


def _no_such_class(name: str, model: nn.Module) -> DistributedError:
    with_weights = {
        type(module).__name__
        for module in model.modules()
        if module is not model and not isinstance(module, CONTAINERS) and next(module.parameters(), None) is not None
    }
    listed = "it has: " + ", ".join(sorted(with_weights))
    close = nearest(name, sorted(with_weights))
    suggestion = f"{close} " if close and close.startswith("did") else ""
    return DistributedError(
        f"{type(model).__name__} has no layer of class {name!r} to wrap",
        code="FG735",
        hint=suggestion + listed,
    ).about("fsdp_config")
