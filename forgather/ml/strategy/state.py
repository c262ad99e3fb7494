"""The local state of models and optimizers by parameter name, and its restoration from a checkpoint.

The functions take modules and optimizers whose tensors may be sharded (DTensors). They return the local state under the
names of the whole model, and read the local part of a checkpoint. Names and shapes do not depend on the layout of
ranks, so one layout can read a checkpoint that another layout wrote. Tied tensors stay one tensor. The structure of the
optimizer state is known without stepping the optimizer. If a checkpoint belongs to another model, it is refused on
every rank before any weight changes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from forgather.errors import CheckpointError, nearest
from forgather.ml.adapter_base import names_of_base, stored_state
from forgather.ml.checkpoint.reader import CheckpointReader, StoredTensor
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.checkpoint.spilled import SpilledTensors
from forgather.ml.checkpoint.state import identity_of, split_tensors
from forgather.ml.distributed import collectives
from forgather.ml.model_class import class_name
from forgather.ml.strategy.precision import Precision
from forgather.ml.strategy.unset_tensors import refuse_unrestored


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor as a single process would have it.

    Collective for a DTensor: every rank of its mesh must call it.

    Shapes:
        tensor: any shape. Returns the global shape.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    # An offloaded tensor is on the CPU, where the group of an accelerator cannot gather.
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    there = DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    whole: Tensor = there.full_tensor()
    return whole


Box = tuple[slice, ...]
"""A part of a tensor, as one slice for each dimension."""


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the part that is the whole of a tensor."""
    return tuple(slice(0, size) for size in shape)


def local_box(tensor: Tensor) -> Box:
    """Returns the part of a tensor that is on this rank: the whole, unless it is a DTensor.

    Shapes:
        tensor: any; the shape of a DTensor is its global shape.
    """
    if not isinstance(tensor, DTensor):
        return whole_box(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def whole_model_state(
    model: nn.Module, gather: Callable[[Tensor], Tensor] = whole_tensor, *, stored_only: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each entry in a model's state, one at a time, with sharded tensors gathered.

    Collective: every rank must iterate to the end. A tied tensor is gathered only once.

    Args:
        model: the model, or the local part of a sharded model.
        gather: a function that returns the whole tensor for a tensor in the model's state.
        stored_only: True to leave out the entries that checkpoints do not keep, see `stored_state`.

    Shapes:
        value: the shape of the whole tensor.
    """
    state = model.state_dict(keep_vars=True)
    if stored_only:
        state = stored_state(model, state)
    # A tied weight is gathered once and kept for its other names; all others are freed by the caller one by one.
    times = Counter(id(value) for value in state.values())
    tied: dict[int, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            yield name, value
        elif times[id(value)] == 1:
            yield name, gather(value)
        else:
            if id(value) not in tied:
                tied[id(value)] = gather(value)
            yield name, tied[id(value)]


def on_host(
    weights: Iterable[tuple[str, Any]],
    *,
    keep: bool,
    place: SpilledTensors | None = None,
    own: Collection[Tensor] = (),
) -> dict[str, Any]:
    """Returns weights on the CPU, by name. Tied weights stay one tensor.

    Args:
        weights: an iterable of (name, value), whose iteration is collective: every rank iterates to the end.
        keep: True to return the weights. False to return an empty dict, on a rank that does not write.
        place: the place of the returned weights; None to keep all in memory.
        own: the tensors of the model on this rank. Weights in the memory of one of them are returned as they are.

    Shapes:
        own: any.
    """
    here = {identity_of(tensor) for tensor in own if tensor.device.type == "cpu" and not isinstance(tensor, DTensor)}
    kept: dict[str, Any] = {}
    moved: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Tensor]] = {}
    for name, value in weights:
        if not keep or not isinstance(value, Tensor):
            kept |= {name: value} if keep else {}
            continue
        memory = identity_of(value)
        earlier = moved.get(memory)
        # Weights may come one at a time, and the memory of a freed one may be used again by the next. The weak
        # reference distinguishes a tied weight from a new one at the same address.
        if earlier is None or earlier[0]() is None:
            earlier = moved[memory] = (weakref.ref(value), _kept(value, None if memory in here else place))
        kept[name] = earlier[1]
    return kept


def _kept(value: Tensor, place: SpilledTensors | None) -> Tensor:
    return value.detach().cpu() if place is None else place.keep(value)


def local_state(
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    *,
    is_first: bool = True,
    aliases: Mapping[str, str] | None = None,
) -> LocalState:
    """Returns the part of the state that this rank stores in a checkpoint.

    Args:
        state: the state of the model or of a part of it, by the names of the whole model, with local tensors (from
            `state_dict` with `keep_vars`).
        optimizer: the optimizer state, as returned by `local_optimizer_state`. None if there is no optimizer.
        is_first: True on the first data-parallel rank. Only the buffers of this rank are stored, since buffers may
            differ between replicas.
        aliases: a mapping of each further name of a tied weight to its first name, for weights that `state` has under
            the first name only. None if there are no such weights.
    """
    tensors, shared, extra = split_tensors(state)
    weights = {name: value for name, value in tensors.items() if is_first or isinstance(value, nn.Parameter)}
    return LocalState(
        weights=weights,
        aliases={**shared, **(aliases or {})},
        extra=extra if is_first else {},
        optimizer=optimizer,
    )


def refuse_other_model(
    kind: str, names: Iterable[str], shapes: Mapping[str, Sequence[int]], saved: CheckpointReader
) -> None:
    """Raises an error if a checkpoint has the weights of another model.

    Args:
        kind: the name of the model class.
        names: the names of all entries in the whole model's state.
        shapes: the global shapes of the weights on this rank, by name.
        saved: the reader of the checkpoint.

    Raises:
        CheckpointError: FG605 if a weight is missing, unknown or of another shape. The error names the first few.
    """
    expected, present = set(names), saved.weights.keys() | saved.extra.keys()
    wrong = [
        f"{name!r} has shape {tuple(saved.weights[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in saved.weights and tuple(saved.weights[name].shape) != tuple(shape)
    ]
    missing, unknown = sorted(expected - present), sorted(present - expected)
    # Shapes are named only if the names agree: another architecture differs in both.
    said = [f"{name!r} is missing" for name in missing] + [f"{name!r} is not in the model" for name in unknown]
    if said or wrong:
        raise CheckpointError(
            f"the weights do not fit {kind}: {_first_few(said or wrong)}",
            code="FG605",
            hint=(nearest(missing[0], unknown) if missing else None)
            or "resume with the model that the checkpoint was written with",
        )


def _first_few(said: Sequence[str], limit: int = 3) -> str:
    return "; ".join(said[:limit]) + (f"; and {len(said) - limit} more" if len(said) > limit else "")


def restore_weights(
    model: nn.Module, names: Iterable[str], modules: Sequence[nn.Module], saved: CheckpointReader
) -> None:
    """Reads the weights of a checkpoint into the modules on this rank. Collective: every rank must call it.

    The frozen weights of an adapter's base model keep their values if the checkpoint does not contain them.

    Args:
        model: the whole model, whose weights may be on the meta device.
        names: the names of all entries in the whole model's state.
        modules: the model, or the parts of the model on this rank, whose parameters have the names of the whole model.
        saved: the reader of the checkpoint.

    Raises:
        CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model; FG748 if a weight
            that waited for the checkpoint has no value afterwards.
    """
    found = [module.state_dict(keep_vars=True) for module in modules]
    names = list(names)
    left_out = names_of_base(model, (*names, *(name for state in found for name in state))) - saved.weights.keys()
    names = [name for name in names if name not in left_out]
    states = [{name: value for name, value in state.items() if name not in left_out} for state in found]
    here = {name: value for state in states for name, value in state.items()}
    shapes = {name: value.shape for name, value in here.items() if isinstance(value, Tensor)}
    # In two steps: no process may have changed a weight when another one refuses.
    collectives.run_collectively(lambda: refuse_other_model(class_name(model), names, shapes, saved))
    collectives.run_collectively(lambda: _read_weights(modules, states, saved))


def _read_weights(modules: Sequence[nn.Module], states: Sequence[Mapping[str, Any]], saved: CheckpointReader) -> None:
    for module, state in zip(modules, states, strict=True):
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        done: set[int] = set()
        others: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                others[name] = saved.extra[name]
            elif id(value) not in own:  # made by a state_dict hook: only the module can put it back
                others[name] = saved.whole(saved.weights[name])
            elif id(value) not in done:
                saved.read(saved.weights[name], value)
                done.add(id(value))
        if others:
            module.load_state_dict(others, strict=False)
        refuse_unrestored(module, done)


AVERAGE = "averaged_weight"
"""The entry of a parameter in a stored optimizer state that has its moving average, and belongs to no optimizer."""

# Settings that depend on the layout and are not restored: a fused operation does not accept whole and sliced weights
# together.
LAYOUT_KEYS = ("fused", "foreach")


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter of a model, by the `id` of the parameter.

    For a parameter that the model contains under several names, the name is the first one in `named_parameters`.
    """
    return {id(parameter): name for name, parameter in model.named_parameters()}


def local_optimizer_state(
    model: nn.Module, optimizer: Optimizer | None, precision: Precision | None = None
) -> dict[str, Any] | None:
    """Returns the local optimizer state by parameter name, or None if there is no optimizer.

    The result has the form {"state": {name: {...}}, "param_groups": [{"params": names, ...}]}. Values that are partial
    sums over ranks are added up, which is collective: every rank in the mesh of the weight must make the call.

    Args:
        model: the model, whose parameter names are used.
        optimizer: the optimizer of the model's parameters. None if there is no optimizer.
        precision: the precision whose loss scale is included under "scaler". None if losses are not scaled.
    """
    if optimizer is None:
        return None
    names = names_of(model)
    packed = optimizer.state_dict()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    # `state_dict` numbers the parameters in the order of the groups, which connects them with their names.
    number = [index for group in packed["param_groups"] for index in group["params"]]
    name_of = dict(zip(number, order, strict=True))
    state = {
        name_of[index]: _without_partial_sums(packed["state"][index]) for index in number if index in packed["state"]
    }
    groups = [{**group, "params": [name_of[index] for index in group["params"]]} for group in packed["param_groups"]]
    scale = {"scaler": precision.state_dict()} if precision is not None and precision.scales else {}
    return {"state": state, "param_groups": groups, **scale}


def _without_partial_sums(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_partial_sums(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_partial_sums(item) for item in value)
    if isinstance(value, DTensor) and (not value.ndim or any(placement.is_partial() for placement in value.placements)):
        return whole_tensor(value)
    return value


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer | None, saved: CheckpointReader, precision: Precision | None = None
) -> None:
    """Restores the local part of an optimizer state from a checkpoint. Collective: every rank must call it.

    Each parameter group gets the settings of the saved group that contains the first parameter of the group, except for
    `fused` and `foreach`. These two keep their values in this run, because whether they can be used depends on the
    layout: a fused operation does not accept whole and sliced weights together.

    Args:
        model: the model, whose parameter names are used.
        optimizer: the optimizer of the model's parameters. If it is None, nothing is restored.
        saved: the reader of the checkpoint.
        precision: the precision whose loss scale is restored too. None if losses are not scaled.

    Raises:
        CheckpointError: FG605, on every rank, if the checkpoint has the state of another optimizer, of other
            parameters, or of groups with other settings.
    """
    tree = saved.optimizer
    if tree is None or optimizer is None:
        return
    names = names_of(model)
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    # A stage of a pipeline trains some of the parameters: only the names of all ranks are those of the checkpoint.
    every = {name for rank in collectives.all_gather(sum(groups, [])) for name in rank}
    collectives.run_collectively(lambda: refuse_other_optimizer(type(optimizer).__name__, every, groups, tree))
    collectives.run_collectively(lambda: _read_optimizer(names, optimizer, tree, saved))
    if precision is not None:
        precision.load_state_dict(tree.get("scaler") or {})


def refuse_other_optimizer(
    kind: str, names: Iterable[str], groups: Iterable[Sequence[str]], tree: Mapping[str, Any]
) -> None:
    """Raises an error if an optimizer state belongs to other parameters, or to groups with other settings.

    A checkpoint with fewer groups is accepted: the settings of a saved group then apply to all groups that consist of
    its parameters.

    Args:
        kind: the name of the optimizer class.
        names: the names of the trainable parameters on all ranks.
        groups: the names of the parameters in each group on this rank.
        tree: the optimizer state in the checkpoint.

    Raises:
        CheckpointError: FG605 if the parameters differ, or if the saved settings differ within one group.
    """
    expected = set(names)
    present = {name for group in tree["param_groups"] for name in group["params"]}
    said = [f"it has no {name!r}" for name in sorted(expected - present)]
    said += [f"it has {name!r}, which is not trained" for name in sorted(present - expected)]
    if said:
        raise _other_optimizer(kind, _first_few(said))
    settings_of = {
        name: {key: value for key, value in group.items() if key not in ("params", *LAYOUT_KEYS)}
        for group in tree["param_groups"]
        for name in group["params"]
    }
    for names in groups:
        other = next((name for name in names if settings_of[name] != settings_of[names[0]]), None)
        if other is not None:
            first, second = settings_of[names[0]], settings_of[other]
            key = next(key for key in first | second if first.get(key) != second.get(key))
            raise _other_optimizer(
                kind,
                f"the checkpoint has {key} {first.get(key)!r} for {names[0]!r} and {second.get(key)!r} for {other!r}, "
                "which are in one group here",
                "resume with the groups that the checkpoint was written with: templates under optimizers/ make "
                "one with weight decay and one without (no_decay), and an optimizer of torch makes a single group",
            )


def _other_optimizer(
    kind: str,
    problem: object,
    hint: str = "resume with the optimizer and the trainable parameters that the checkpoint was written with",
) -> CheckpointError:
    return CheckpointError(f"the optimizer state does not fit {kind}: {problem}", code="FG605", hint=hint)


def _read_optimizer(
    names: Mapping[int, str], optimizer: Optimizer, tree: Mapping[str, Any], saved: CheckpointReader
) -> None:
    groups_of = {name: group for group in tree["param_groups"] for name in group["params"]}
    packed = optimizer.state_dict()
    entries: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, numbers in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        here = [names[id(parameter)] for parameter in group["params"]]
        # `params` are numbers of this optimizer; in the checkpoint they are names.
        own = {name: numbers[name] for name in ("params", *LAYOUT_KEYS) if name in numbers}
        saved_group = groups_of[here[0]] if here else _rates_of_base(tree)
        groups.append({**numbers, **saved_group, **own})
        for index, name, parameter in zip(numbers["params"], here, group["params"], strict=True):
            own_state = {key: value for key, value in tree["state"].get(name, {}).items() if key != AVERAGE}
            if own_state:
                entries[index] = _restored_value(own_state, parameter, saved)
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    except (ValueError, KeyError, RuntimeError) as error:
        raise _other_optimizer(type(optimizer).__name__, error) from None


def _rates_of_base(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the learning rates of the saved groups without a name, for a group that has no parameter on this rank."""
    base: dict[str, Any] = next((group for group in tree["param_groups"] if not group.get("name")), {})
    return {key: base[key] for key in ("lr", "initial_lr") if key in base}


def _restored_value(value: Any, parameter: nn.Parameter, saved: CheckpointReader) -> Any:
    """Returns a value in the optimizer state, placed as the optimizer stores it for its parameter."""
    if isinstance(value, Mapping):
        return {key: _restored_value(item, parameter, saved) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored_value(item, parameter, saved) for item in value)
    if not isinstance(value, StoredTensor):
        return value.clone() if isinstance(value, Tensor) else value
    there = like_parameter(value, parameter)
    saved.read(value, there)
    return there


def like_parameter(stored: StoredTensor, parameter: nn.Parameter) -> Tensor:
    """Returns an empty tensor for a stored one that belongs to a parameter, placed on the ranks as the parameter.

    Args:
        stored: the tensor in the checkpoint.
        parameter: the parameter.

    Shapes:
        Returns the global shape of `stored`.
    """
    if not isinstance(parameter, DTensor):
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)
    mesh, device = parameter.device_mesh, parameter.to_local().device
    # A factored state (Adafactor's row and column means): torch computes it from sharded tensors and keeps it whole.
    if stored.shape != parameter.shape:
        local = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local = torch.empty(parameter.to_local().shape, dtype=stored.dtype, device=device)
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
