"""The update of each weight inside the backward pass, as soon as its gradient is complete.

It takes an optimizer that updates each weight from its own gradient and state; while it is on, a hook of autograd (or
of FSDP2, after its reduction) steps the optimizer for one weight and frees the gradient. Invariants: groups, state and
state dict stay those of the optimizer, so that schedules and checkpoints know nothing of it; every weight is updated
once in a step; a flag on the device (`found_inf`) leaves out the updates as in `OptimizerStep`; the hooks go with the
`BackwardUpdate`, and keep neither it nor the optimizer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from forgather.errors import DistributedError, TrainingError
from forgather.ml.strategy.optimizer_step import OptimizerStep, inner_optimizers

_SETTING = "optimizer_in_backward"


class BackwardUpdate:
    """Steps an optimizer inside of backward passes, weight by weight.

    Args:
        optimizer: the optimizer, or an optimizer that contains others.
        streams: the module that has `accelerator.current_stream`, as torch does.

    Attributes:
        before: what is called with this rank's part of the loss before the weights change; if it raises, they do not.

    Raises:
        TrainingError: FG707 if the optimizer is of an unknown library.

    Source:
        `torch.Tensor.register_post_accumulate_grad_hook`; torch's tutorial on it makes an optimizer for each weight,
        which would have states and groups of their own.
    """

    def __init__(self, optimizer: Optimizer, *, streams: Any = torch) -> None:
        if not OptimizerStep(optimizer).can_skip:
            raise TrainingError(
                f"optimizer_in_backward is true, and {type(optimizer).__name__} of {type(optimizer).__module__} is not "
                "known to update each weight from its own gradient",
                code="FG707",
                hint="use an optimizer of torch, transformers, torchao or bitsandbytes, or remove the setting",
            ).about(_SETTING)
        self.before: Callable[[Tensor], None] | None = None
        self._optimizer: Any = optimizer
        self._streams = streams
        self._device = torch.device("cpu")
        self._hooked: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)
        self._places: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._twins: dict[int, tuple[Any, OptimizerStep]] = {}
        self._updated: set[int] = set()

    @contextlib.contextmanager
    def on(self, share: Tensor) -> Iterator[None]:
        """Context manager in which the backward pass of a step updates the weights.

        Args:
            share: the part of the loss that this rank has computed.

        Shapes:
            share: a scalar tensor.
        """
        if self.before is not None:
            self.before(share)
        self._device = share.device
        # Not kept: a restored state dict replaces the groups, and a freezing may end.
        self._places = {
            id(one): (part, group)
            for part in inner_optimizers(self._optimizer)
            for group in part.param_groups
            for one in group["params"]
        }
        for part in inner_optimizers(self._optimizer):
            for group in part.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and id(parameter) not in self._hooked:
                        self._hooked[id(parameter)] = parameter
                        hook = _hook_of(weakref.WeakMethod(self._update))
                        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._updated.clear()
        try:
            yield
        finally:
            self._places = {}

    def _update(self, parameter: Any) -> None:
        found = self._places.get(id(parameter))
        if found is None:
            return
        if id(parameter) in self._updated:
            raise TrainingError(
                "the gradient of a weight was completed twice in a step, and optimizer_in_backward has applied its "
                "first part already",
                code="FG707",
                hint="remove optimizer_in_backward; re-entrant checkpointing and a second backward pass do this",
            ).about(_SETTING)
        self._updated.add(id(parameter))
        if parameter.device.type == "cpu" and self._device.type != "cpu":
            # With weights in host memory, FSDP2 before torch 2.13 does not wait until their gradients are there.
            self._streams.accelerator.current_stream(self._device).synchronize()
        self._twin(parameter, *found)()
        parameter.grad = None

    def _twin(self, parameter: Any, part: Any, group: dict[str, Any]) -> OptimizerStep:
        """Returns the step of an optimizer that has the class and the state of `part`, and one weight."""
        if id(parameter) not in self._twins:
            # The constructor is not called, as its arguments are not known.
            twin: Any = object.__new__(type(part))
            twin.param_groups = [{**group, "params": [parameter]}]
            self._twins[id(parameter)] = twin, OptimizerStep(twin)
        twin, step = self._twins[id(parameter)]
        vars(twin).update(vars(part))
        # A schedule wraps `step` to count the steps of the optimizer itself, whose hooks belong to whole steps, too.
        vars(twin).pop("step", None)
        vars(twin).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
        twin.param_groups = [{**group, "params": [parameter]}]
        for name in ("found_inf", "grad_scale"):
            if hasattr(self._optimizer, name):
                setattr(twin, name, getattr(self._optimizer, name))
        return step


def _hook_of(update: weakref.WeakMethod[Callable[[Any], None]]) -> Callable[[Tensor], None]:
    """Returns a hook of a weight, which must not keep the state of an optimizer that is used no more."""

    def hook(parameter: Tensor) -> None:
        call = update()
        if call is not None:
            call(parameter)

    return hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def refuse_several(num_batches: int) -> None:
    """Raises an error if a step whose weights are updated in its backward pass has several micro-batches.

    Args:
        num_batches: the number of micro-batches of the step.

    Raises:
        TrainingError: FG707 if there are several.
    """
    if num_batches != 1:
        raise TrainingError(
            f"a step has {num_batches} micro-batches, and optimizer_in_backward updates the weights in the backward "
            "pass of the first",
            code="FG707",
            hint="set gradient_accumulation_steps: 1, or remove optimizer_in_backward",
        ).about(_SETTING)


def kept_gradients(strategy: str, world_size: int) -> DistributedError:
    """Returns the FG707 error of a strategy that needs gradients after they were accumulated.

    Args:
        strategy: the title of the strategy.
        world_size: the number of processes.
    """
    return DistributedError(
        f"{_SETTING} is true, and {strategy} with {world_size} processes keeps gradients until the backward pass ends",
        code="FG707",
        hint=f"set fsdp: true without tensor_parallel_size, or remove {_SETTING}",
    ).about(_SETTING)
