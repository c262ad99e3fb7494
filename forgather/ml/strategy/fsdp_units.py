"""Which modules of a model are gathered, computed and freed as one unit.

Takes a model (with or without memory) and a `Sharding`; gives the units, shards them, and has them computed anew in
the backward pass. Keeps true: names of parameters stay as they are; gradients are summed over replicas, never averaged;
a class that the model does not have is answered with those that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forgather.errors import DistributedError, nearest
from forgather.ml.log import get_logger
from forgather.ml.strategy.fsdp_config import MixedPrecision, Recompute, Sharding

_log = get_logger(__name__)

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_LISTS, nn.Sequential)


def units_of(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Returns the modules that become units beside the model itself, outer ones after those they contain.

    Raises:
        DistributedError: FG735 for a class that no module of the model has.
    """
    if sharding.wrap == "none":
        return []
    if sharding.wrap == "size":
        return _with_all_owners(model, _large_modules(model, sharding.min_num_params))
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
    return _with_all_owners(model, found or _repeated_blocks(model))


def shard(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shards a model over a mesh, in place, unit by unit and then the rest."""
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": (sharding.precision or MixedPrecision()).policy,
        "offload_policy": sharding.offload_policy(mesh.device_type),
    }
    for unit in units:
        fully_shard(unit, reshard_after_forward=sharding.reshard_after_forward, **settings)
    # The backward pass begins with what the root holds: it is kept, unless it is all there is.
    fully_shard(model, reshard_after_forward=sharding.reshard_after_forward and not units, **settings)
    for module in [*units, model]:
        # Shares of a loss are added. A mean that is multiplied again rounds wherever a model computes in less than its
        # weights have. Sums are asked for by name: gloo has no sum with a factor.
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
    """Moves what is no parameter to where the computation is: only parameters are offloaded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def checkpoint_units(model: nn.Module, units: list[nn.Module], sharding: Sharding) -> bool:
    """Makes the backward pass compute units again, as far as settings say; returns whether they do."""
    if sharding.recompute == "none":
        return False
    checkpoint_activations(units or [model], sharding.recompute)
    return True


def checkpoint_activations(modules: Iterable[nn.Module], recompute: Recompute) -> None:
    """Makes the backward pass compute modules again, one after the other: same gradients, less memory."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    for unit in modules:
        unit.forward = _recomputed(unit, unit.forward, settings)


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(unit: nn.Module, forward: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        if not (unit.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **settings, **kwargs)

    return recomputing_forward


def _with_all_owners(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Returns the units without those that share a weight with a module outside: it belongs to the root then."""
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


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += list(child.children()) if isinstance(child, _CONTAINERS) else _repeated_blocks(child)
    return [block for block in blocks if any(True for _ in block.parameters())]


def _large_modules(model: nn.Module, at_least: int) -> list[nn.Module]:
    """Returns the innermost modules of at least so many parameters, each counted without what is in another.

    Single layers are none: what is gathered for so little costs more than it saves.
    """
    found: list[nn.Module] = []

    def left_in(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        children = list(module.children())
        left = own + sum(left_in(child) for child in children)
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
        if module is not model and not isinstance(module, _CONTAINERS) and next(module.parameters(), None) is not None
    }
    listed = "it has: " + ", ".join(sorted(with_weights))
    close = nearest(name, sorted(with_weights))
    suggestion = f"{close} " if close and close.startswith("did") else ""
    return DistributedError(
        f"{type(model).__name__} has no layer of class {name!r} to wrap",
        code="FG735",
        hint=suggestion + listed,
    ).about("fsdp_config")
