"""FSDP2 units: modules whose weights are gathered together before the module computes, and freed together afterwards.

The functions take a model (which may be on the meta device) and a `Sharding`. They find the units, shard them, and make
the backward pass recompute their activations. The token embedding and the output head are units of their own. The
root unit has the remaining weights, which stay gathered for a whole step. Parameter names do not change. Gradients are
summed over replicas, not averaged. The error about an unknown class lists the classes that the model has.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fully_shard
from transformers import PreTrainedModel

from forgather.errors import DistributedError, nearest
from forgather.ml.activation_checkpointing import CONTAINERS, checkpoint_activations, repeated_blocks
from forgather.ml.adapter_base import is_peft_model
from forgather.ml.log import get_logger
from forgather.ml.losses import is_causal_lm
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_precision import MixedPrecision

_log = get_logger(__name__)

_POST_FORWARD_MESH = "_get_post_forward_mesh_info"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnits:
    """The units before and after the blocks of a model.

    Args:
        embedding: the token embedding, or None if the root unit shards it.
        head: the output head, or None if the root unit shards it.
        body: the module whose output the head reads. None without a head.
    """

    embedding: nn.Module | None = None
    head: nn.Module | None = None
    body: nn.Module | None = None

    def in_order(self, units: list[nn.Module]) -> list[nn.Module]:
        """Returns all units in the order of the forward pass.

        Args:
            units: the units between the two ends.
        """
        return [unit for unit in (self.embedding, *units, self.head) if unit is not None]


def end_units_of(model: nn.Module, units: list[nn.Module], sharding: Sharding) -> EndUnits:
    """Returns the token embedding and the output head of a transformers model, where they can be units of their own.

    A tied embedding and head remain in the root unit, which then is the one unit of their weight. So does the embedding
    of a causal language model without a head module, because such a model may compute its logits with that weight.

    Args:
        model: the model to shard.
        units: the units, as returned by `units_of`.
        sharding: the settings of FSDP2, of which `wrap_embeddings` turns these units on.
    """
    whole = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    if not (units and sharding.wrap_embeddings and isinstance(whole, PreTrainedModel)):
        return EndUnits()
    head = whole.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding = _input_embeddings(whole)
    if head is None and is_causal_lm(whole):
        return EndUnits()
    inside = {id(module) for unit in units for module in unit.modules()}
    ends = [end for end in (embedding, head) if isinstance(end, nn.Module) and id(end) not in inside]
    alone = {id(end) for end in _untied_units(model, ends)} - {id(whole), id(model)}
    body = whole.base_model
    has_head = id(head) in alone and body is not whole
    return EndUnits(
        embedding=embedding if id(embedding) in alone else None,
        head=head if has_head else None,
        body=body if has_head else None,
    )


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # a model of other inputs than tokens
        return None


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights of all sharded units of a model.

    Args:
        model: the model, or the part of it on this rank.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_freed_after_forward(unit: FSDPModule) -> bool:
    """Returns whether the backward pass gathers the weights of a unit again from all ranks that shard them.

    Args:
        unit: a sharded unit.
    """
    groups = unit._get_fsdp_state()._fsdp_param_groups
    return any(group.post_forward_mesh_info is group.mesh_info for group in groups)


def shard(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, sharding: Sharding, *, ends: EndUnits | None = None
) -> None:
    """Shards a model over a mesh in place: each unit first, and then the remaining weights as the root unit.

    Args:
        model: the model to shard.
        units: the units, as returned by `units_of`.
        mesh: the mesh of the ranks that shard or replicate the weights.
        sharding: the settings of FSDP2.
        ends: the units before and after these units. None to leave their weights in the root unit.

    Raises:
        DistributedError: FG734 if the ranks that shard one replica cannot be divided into groups of the given size.
    """
    ends = ends or EndUnits()
    units = ends.in_order(units)
    _refuse_uneven_groups(sharding, mesh)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": (sharding.precision or MixedPrecision()).policy,
        "offload_policy": sharding.offload_policy(mesh.device_type),
    }
    with _one_mesh_after_forward() if sharding.keeps_groups else contextlib.nullcontext():
        _shard_each(model, units, ends, sharding, settings)
    if ends.head is not None and ends.body is not None:
        # Fused losses, such as Liger's, read the weight of the head without calling it.
        ends.body.register_forward_hook(functools.partial(_gather, ends.head))
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


def _shard_each(
    model: nn.Module, units: list[nn.Module], ends: EndUnits, sharding: Sharding, settings: dict[str, Any]
) -> None:
    for unit in units:
        # The backward pass starts with the head and the weights of the root unit. They therefore stay gathered after
        # the forward pass, unless the root is the only unit.
        fully_shard(
            unit, reshard_after_forward=sharding.reshard_after_forward if unit is not ends.head else False, **settings
        )
    fully_shard(model, reshard_after_forward=False if units else sharding.reshard_after_forward, **settings)


@contextlib.contextmanager
def _one_mesh_after_forward() -> Iterator[None]:
    """Context manager in which all units share the groups of a numeric `reshard_after_forward`.

    torch makes process groups for each unit, and each would take memory of its own on a GPU.
    """
    original = getattr(_fully_shard, _POST_FORWARD_MESH)
    made: list[Any] = []

    def made_once(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return original(reshard_after_forward, mesh_info)
        if not made:
            made.append(original(reshard_after_forward, mesh_info))
        return made[0]

    setattr(_fully_shard, _POST_FORWARD_MESH, made_once)
    try:
        yield
    finally:
        setattr(_fully_shard, _POST_FORWARD_MESH, original)


def _gather(head: nn.Module, *_: Any) -> None:
    head.unshard()  # type: ignore[operator]


def _refuse_uneven_groups(sharding: Sharding, mesh: DeviceMesh) -> None:
    size, ranks = sharding.reshard_after_forward, mesh.size(mesh.ndim - 1)
    if sharding.keeps_groups and ranks % size:
        raise DistributedError(
            f"fsdp_config.reshard_after_forward is {size}, and {ranks} ranks that shard the weights cannot be divided "
            "into groups of that size",
            code="FG734",
            hint=f"give a number that divides {ranks}, or true or false",
            expected=ranks,
            found=size,
        ).about("fsdp_config")


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
