"""One step of an optimizer whose weights lie on several meshes, and a step that a flag on the device can undo.

`OptimizerStep` calls the optimizer once for each mesh, since torch cannot update DTensors of different meshes, or
DTensors and plain tensors, by one operator. A fused optimizer of torch skips a step by itself if its `found_inf` is
set. For the others, weights and states are copied before the step and put back on the device, a bucket of weights at a
time, so that the host need not know whether the step was bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgather.ml.low_bit_optim import plain_parts

BUCKET_BYTES = 256 * 2**20
"""The bytes of weights that are copied at a time."""

_BY_WEIGHT = ("torch.", "transformers.", "bitsandbytes.", "torchao.", "forgather.")
"""The packages whose optimizers update each weight from its own gradient and state, and skip weights without one."""


class OptimizerStep:
    """Steps an optimizer.

    Args:
        optimizer: the optimizer, or an optimizer that contains others.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._parts = list(inner_optimizers(optimizer))
        # A composite optimizer does not hand the flag on.
        self._is_whole = self._parts == [optimizer]
        self._is_fused = self._is_whole and getattr(optimizer, "_step_supports_amp_scaling", False)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._is_of_one_mesh = len(by_mesh(parameters)) <= 1
        self._has_stepped: set[int] = set()

    @property
    def can_skip(self) -> bool:
        """Whether a step can be left out by a flag on the device: the optimizer's attribute `found_inf`."""
        return all(type(part).__module__.startswith(_BY_WEIGHT) for part in [self._optimizer, *self._parts])

    def __call__(self) -> None:
        """Steps the optimizer, unless its attribute `found_inf` is a tensor that is not 0."""
        bad: Tensor | None = getattr(self._optimizer, "found_inf", None)
        if self._is_of_one_mesh and (bad is None or self._is_fused):
            self._optimizer.step()
            return
        trained = [one for group in self._optimizer.param_groups for one in group["params"] if one.grad is not None]
        # `foreach` that is neither set nor left to torch takes the weights one by one, whatever their meshes are.
        at_once = any(group.get("fused") or group.get("foreach") for group in self._optimizer.param_groups)
        parts = by_mesh(trained) if self._is_whole and at_once else [trained]
        if bad is None or self._is_fused:
            self._step(parts, trained)
            return
        # An optimizer that cannot skip refuses the flag.
        self._optimizer.found_inf = None
        try:
            self._step([bucket for part in parts for bucket in _buckets(part)], trained, bad)
        finally:
            self._optimizer.found_inf = bad

    def _step(
        self, parts: Sequence[list[nn.Parameter]], trained: list[nn.Parameter], bad: Tensor | None = None
    ) -> None:
        if len(parts) <= 1:
            self._step_part(trained, bad)
            return
        gradients = {parameter: parameter.grad for parameter in trained}
        for part in parts:
            # An optimizer skips weights without a gradient.
            for parameter in trained:
                parameter.grad = None
            for parameter in part:
                parameter.grad = gradients[parameter]
            self._step_part(part, bad)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    @torch.no_grad()
    def _step_part(self, part: list[nn.Parameter], bad: Tensor | None) -> None:
        if bad is None:
            self._optimizer.step()
            return
        new = {id(parameter) for parameter in part} - self._has_stepped
        # The first step of a weight makes its state, which cannot be put back: the host waits, once.
        if new and bool(bad):
            return
        self._has_stepped |= new
        weights = [] if new else [(weight, weight.clone()) for weight in map(_local, part)]
        states = [] if new else [(state, self._copied(state, bad.device)) for state in self._states(part)]
        self._optimizer.step()
        for weight, kept in weights:
            torch.where(bad.bool(), kept, weight, out=weight)
        for state, copied in states:
            _put_back(state, copied, bad.bool())

    def _states(self, part: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        found = [one.state[parameter] for parameter in part for one in self._parts if parameter in one.state]
        # By identity: the parts of a composite optimizer share one state.
        return list({id(state): state for state in found}.values())

    @staticmethod
    def _copied(state: dict[str, Any], device: torch.device) -> dict[str, list[Tensor]]:
        """Returns copies of the tensors of a state that are on the device of the flag; torch counts steps elsewhere."""
        there = {name: plain_parts(value) for name, value in state.items() if isinstance(value, Tensor)}
        return {name: [part.clone() for part in parts] for name, parts in there.items() if parts[0].device == device}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _put_back(state: dict[str, Any], copied: dict[str, list[Tensor]], is_bad: Tensor) -> None:
    for name, kept in copied.items():
        # Adafactor puts a new tensor into its state in each step; all others write into the one that is there.
        for part, old in zip(plain_parts(state[name]), kept, strict=True):
            torch.where(is_bad, old, part, out=part)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters that one operator can update, for each mesh, and those that are plain tensors.

    Args:
        parameters: plain tensors and DTensors.
    """
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def inner_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """Yields the optimizers that are stored in the attributes of a composite optimizer.

    Yields the given optimizer if it is not a composite one.

    Args:
        optimizer: an optimizer, or an object that holds optimizers.
    """
    held = [one for value in vars(optimizer).values() for one in (value if isinstance(value, list) else [value])]
    inner = [one for one in held if isinstance(one, Optimizer)]
    if inner:
        for one in inner:
            yield from inner_optimizers(one)
    elif isinstance(optimizer, Optimizer):
        yield optimizer
