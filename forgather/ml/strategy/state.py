"""State of a model and an optimizer by the names of the parameters, as it lies here; and back to where it lies.

Takes modules and optimizers whose tensors may be sharded (DTensors); gives what lies here under the names of the whole
model, and reads a checkpoint as far as it lies here. Keeps true: names and shapes say nothing of the layout, so what
one layout wrote another reads; tensors that several names share are one tensor; the optimizer is not stepped to find
out what its state looks like; a checkpoint of another model is refused on every process before anything is changed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from forgather.errors import CheckpointError, nearest
from forgather.ml.checkpoint.reader import CheckpointReader, StoredTensor
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.checkpoint.state import identity_of, split_tensors
from forgather.ml.distributed import collectives
from forgather.ml.strategy.precision import Precision


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


def local_slice(whole: Tensor, like: Tensor) -> Tensor:
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


def on_host(weights: Iterable[tuple[str, Any]], *, keep: bool) -> dict[str, Any]:
    """Returns weights by name, on the host; what several names share stays shared.

    Args:
        weights: of all processes together; each of them iterates over it.
        keep: False returns nothing, on processes that do not write.
    """
    kept: dict[str, Any] = {}
    moved: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Tensor]] = {}
    for name, value in weights:
        if not keep or not isinstance(value, Tensor):
            kept |= {name: value} if keep else {}
            continue
        memory = identity_of(value)
        earlier = moved.get(memory)
        # Weights may come one at a time: the memory of one that is gone is used again by the next.
        if earlier is None or earlier[0]() is None:
            earlier = moved[memory] = (weakref.ref(value), value.detach().cpu())
        kept[name] = earlier[1]
    return kept


def local_state(
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    *,
    is_first: bool = True,
    aliases: Mapping[str, str] | None = None,
) -> LocalState:
    """Returns what of a state lies here.

    Args:
        state: the model's or a part's, by names of the whole model, its tensors as they lie here (`keep_vars`).
        optimizer: as `local_optimizer_state` gives it; None where there is none.
        is_first: whether this is the first replica: buffers, which may differ between replicas, are its own.
        aliases: further names of weights that `state` has under their first name alone.
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
    """Raises where a checkpoint is that of another model.

    Args:
        kind: what the model is called.
        names: of the state of the whole model.
        shapes: of the weights that lie here, each that of the whole weight.
        saved: the checkpoint.

    Raises:
        CheckpointError: FG605, with the first weights that are missing, unknown, or of another shape.
    """
    expected, present = set(names), saved.weights.keys() | saved.extra.keys()
    wrong = [
        f"{name!r} has shape {tuple(saved.weights[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in saved.weights and tuple(saved.weights[name].shape) != tuple(shape)
    ]
    missing, unknown = sorted(expected - present), sorted(present - expected)
    said = [f"{name!r} is missing" for name in missing] + [f"{name!r} is not in the model" for name in unknown]
    if said or wrong:
        raise CheckpointError(
            f"the weights do not fit {kind}: {_first(said or wrong)}",
            code="FG605",
            hint=(nearest(missing[0], unknown) if missing else None)
            or "resume with the model that the checkpoint was written with",
        )


def _first(said: Sequence[str], limit: int = 3) -> str:
    return "; ".join(said[:limit]) + (f"; and {len(said) - limit} more" if len(said) > limit else "")


def restore_weights(kind: str, names: Iterable[str], modules: Sequence[nn.Module], saved: CheckpointReader) -> None:
    """Puts the weights of a checkpoint where they lie in this process; every process calls it.

    Args:
        kind: what the model is called.
        names: of the state of the whole model.
        modules: the model, or the parts of it that lie here, with the names of the whole.
        saved: the checkpoint.

    Raises:
        CheckpointError: FG605, on every process, where it is that of another model.
    """
    states = [module.state_dict(keep_vars=True) for module in modules]
    here = {name: value for state in states for name, value in state.items()}
    shapes = {name: value.shape for name, value in here.items() if isinstance(value, Tensor)}
    collectives.run_collectively(lambda: refuse_other_model(kind, names, shapes, saved))
    collectives.run_collectively(lambda: _read_weights(modules, states, saved))


def _read_weights(modules: Sequence[nn.Module], states: Sequence[Mapping[str, Any]], saved: CheckpointReader) -> None:
    for module, state in zip(modules, states, strict=True):
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        done: set[int] = set()
        others: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                others[name] = saved.extra[name]
            elif id(value) not in own:  # computed for the state: only the module knows where it goes
                others[name] = saved.whole(saved.weights[name])
            elif id(value) not in done:
                saved.read(saved.weights[name], value)
                done.add(id(value))
        if others:
            module.load_state_dict(others, strict=False)


LAYOUT_KEYS = ("fused", "foreach")


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the name of each parameter by its id; the first name of one that is shared."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def local_optimizer_state(
    model: nn.Module, optimizer: Optimizer | None, precision: Precision | None = None
) -> dict[str, Any] | None:
    """Returns {"state": {name: {...}}, "param_groups": [{"params": names, ...}]} of what lies here.

    What no process alone can tell (a sum over processes that is not taken yet) is made whole: collective over the
    mesh of the weight.

    Args:
        model: tells the names.
        optimizer: of parameters of the model; None for none.
        precision: whose scale of losses goes with it, as "scaler"; None where nothing is scaled.
    """
    if optimizer is None:
        return None
    names = names_of(model)
    packed = optimizer.state_dict()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    number = [index for group in packed["param_groups"] for index in group["params"]]
    name_of = dict(zip(number, order, strict=True))
    state = {name_of[index]: _known(packed["state"][index]) for index in number if index in packed["state"]}
    groups = [{**group, "params": [name_of[index] for index in group["params"]]} for group in packed["param_groups"]]
    scale = {"scaler": precision.state_dict()} if precision is not None and precision.scales else {}
    return {"state": state, "param_groups": groups, **scale}


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_known(item) for item in value)
    if isinstance(value, DTensor) and (not value.ndim or any(placement.is_partial() for placement in value.placements)):
        return whole_tensor(value)
    return value


def restore_optimizer(
    model: nn.Module, optimizer: Optimizer | None, saved: CheckpointReader, precision: Precision | None = None
) -> None:
    """Gives an optimizer its state out of a checkpoint, as far as it lies here; every process calls it.

    Settings of a group come from the saved group that holds its first parameter, but for those that say how a step is
    computed: one fused operation takes no whole weights beside sliced ones.

    Args:
        model: tells the names.
        optimizer: of parameters of the model; None for none.
        saved: the checkpoint.
        precision: whose scale of losses goes on with it; None where nothing is scaled.

    Raises:
        CheckpointError: FG605, on every process, where it is the state of another optimizer, of other parameters, or of
            other groups of them.
    """
    tree = saved.optimizer
    if tree is None or optimizer is None:
        return
    names = names_of(model)
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    every = {name for rank in collectives.all_gather(sum(groups, [])) for name in rank}
    collectives.run_collectively(lambda: refuse_other_optimizer(type(optimizer).__name__, every, groups, tree))
    collectives.run_collectively(lambda: _read_optimizer(names, optimizer, tree, saved))
    if precision is not None:
        precision.load_state_dict(tree.get("scaler") or {})


def refuse_other_optimizer(
    kind: str, names: Iterable[str], groups: Iterable[Sequence[str]], tree: Mapping[str, Any]
) -> None:
    """Raises if the state of an optimizer is that of other parameters, or of groups with other settings.

    A checkpoint of fewer groups is accepted: its settings apply to all groups made of its parameters.

    Args:
        kind: name of the optimizer class.
        names: of the trained parameters of all processes.
        groups: names of the parameters of each group of this process.
        tree: the state in the checkpoint.

    Raises:
        CheckpointError: FG605.
    """
    expected = set(names)
    present = {name for group in tree["param_groups"] for name in group["params"]}
    said = [f"it has no {name!r}" for name in sorted(expected - present)]
    said += [f"it has {name!r}, which is not trained" for name in sorted(present - expected)]
    if said:
        raise _other_optimizer(kind, _first(said))
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
        own = {name: numbers[name] for name in ("params", *LAYOUT_KEYS) if name in numbers}
        groups.append({**numbers, **(groups_of[here[0]] if here else {}), **own})
        for index, name, parameter in zip(numbers["params"], here, group["params"], strict=True):
            if name in tree["state"]:
                entries[index] = _placed(tree["state"][name], parameter, saved)
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    except (ValueError, KeyError, RuntimeError) as error:
        raise _other_optimizer(type(optimizer).__name__, error) from None


def _placed(value: Any, parameter: nn.Parameter, saved: CheckpointReader) -> Any:
    """Returns a value of the state as it belongs beside its parameter."""
    if isinstance(value, Mapping):
        return {key: _placed(item, parameter, saved) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, parameter, saved) for item in value)
    if not isinstance(value, StoredTensor):
        return value.clone() if isinstance(value, Tensor) else value
    there = _room(value, parameter)
    saved.read(value, there)
    return there


def _room(stored: StoredTensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)
    mesh, device = parameter.device_mesh, parameter.to_local().device
    if stored.shape != parameter.shape:  # factored: torch computes it from sharded tensors and keeps it whole
        local = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local = torch.empty(parameter.to_local().shape, dtype=stored.dtype, device=device)
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
