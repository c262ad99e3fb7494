"""How much state an optimizer will keep, before it has made a step.

Takes a model and its optimizer; gives bytes by the names of parameters. Keeps true: nothing of either changes, and no
memory is taken; an optimizer that cannot be tried without memory is taken for one that keeps two numbers of float32 for
each weight, as Adam does.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.ml.strategy.state import names_of

_ON_THE_HOST = {"foreach": False, "fused": False, "capturable": False}


def optimizer_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Returns the bytes that a checkpoint needs for what the optimizer will keep of each parameter.

    Args:
        model: tells the names; of a weight that lies in parts, the whole counts.
        optimizer: has made no step.
    """
    names = names_of(model)
    found: dict[int, dict[str, Any]] = {}
    for part in _parts(optimizer):
        found |= _state_after_a_step(part)
    return {
        name: _written(found[number] if number in found else _adam(parameter), name)
        for parameter in model.parameters()
        if parameter.requires_grad and (name := names.get(number := id(parameter)))
    }


def _parts(optimizer: Any) -> Iterator[Optimizer]:
    """Yields the optimizers that one is made of; itself where it is made of none."""
    held = [one for value in vars(optimizer).values() for one in (value if isinstance(value, list) else [value])]
    inner = [one for one in held if isinstance(one, Optimizer)]
    if inner:
        for one in inner:
            yield from _parts(one)
    elif isinstance(optimizer, Optimizer):
        yield optimizer


def _state_after_a_step(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        stand_ins = [_stand_in(parameter) for parameter in group["params"]]
        twin = object.__new__(type(optimizer))
        twin.__dict__ |= vars(optimizer)
        twin.__dict__.pop("step", None)  # a schedule counts the steps of the optimizer that it belongs to
        twin.__dict__ |= {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}
        twin.state = defaultdict(dict)
        twin.param_groups = [{**group, "params": stand_ins, **{n: v for n, v in _ON_THE_HOST.items() if n in group}}]
        has_stepped = False
        # It makes its state before it computes; without memory it may not be able to compute.
        with suppress(Exception):
            twin.step()
            has_stepped = True
        for parameter, stand_in in zip(group["params"], stand_ins, strict=True):
            if has_stepped or stand_in in twin.state:
                found[id(parameter)] = twin.state[stand_in]
    return found


def _stand_in(parameter: Tensor) -> Tensor:
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta", requires_grad=True)
    stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _adam(parameter: Tensor) -> dict[str, Any]:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return {name: torch.empty(shape, device="meta") for name in ("exp_avg", "exp_avg_sq")}


def _written(state: dict[str, Any], name: str) -> int:
    # Beside its values a tensor has a line in the header of its file, and its name in the index.
    return sum(
        value.nbytes + 2 * len(name) + 160 if isinstance(value, Tensor) else len(name) + 40 for value in state.values()
    )
