"""What stands in a stage for the parts of a model that lie elsewhere, and how hidden states pass by them.

Takes names and a gate; gives modules that have no parameters. Keeps true: what is not reached in a right stage refuses
to be called, and what is computed before the hidden states enter is not a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.strategy.pipeline.trace import first_tensor, with_first_tensor


class StageExit(Exception):  # noqa: N818 - not an error: the way out of a forward pass
    """Hidden states that leave the stage."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class SentBack(torch.autograd.Function):
    """Hidden states as they are; their gradient in one piece, for gloo sends nothing else."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        """Returns the hidden states."""
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient, laid out without gaps."""
        return gradient.contiguous()


class Gate:
    """Where hidden states wait until the first block is reached."""

    def __init__(self) -> None:
        self.states: Tensor | None = None
        self.like: Tensor | None = None
        self.unused = math.nan

    def open(self, states: Tensor, unused: float) -> None:
        """Lets hidden states in; `unused` is what is computed with until they are reached."""
        self.states, self.like, self.unused = states, states, unused

    def take(self) -> Tensor:
        """Returns the hidden states, once."""
        if self.states is None:
            raise RuntimeError("a block was called twice in one forward pass of its stage")
        states, self.states = self.states, None
        return states

    def close(self) -> None:
        """Keeps nothing of the forward pass."""
        self.states = self.like = None


class _Absent(nn.Module):
    """Stands for what another stage holds."""

    def __init__(self, name: str, gate: Gate, *, width: int | None = None) -> None:
        super().__init__()
        self.name, self.gate, self.width = name, gate, width

    def extra_repr(self) -> str:
        return f"{self.name!r} lies in another stage"


class AbsentBefore(_Absent):
    """What lies before the blocks: called on a later stage, where the result is discarded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns something of the right shape that is not a number."""
        like = self.gate.like
        if like is None or self.gate.states is None:
            raise _used_elsewhere(self.name, "after the first block of a later stage")
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is not None and self.width is None and given.is_floating_point():
            return given
        shape = () if given is None or self.width is None else (*given.shape, self.width)
        return like.detach().new_full((), self.gate.unused).expand(shape)


class AbsentAfter(_Absent):
    """What lies after the blocks: never reached on an earlier stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses."""
        raise _used_elsewhere(self.name, "before the last block")


class AbsentEarlier(_Absent):
    """A block of an earlier stage: hands through what is discarded."""

    def __init__(self, name: str, gate: Gate, *, num_outputs: int | None, enters: bool) -> None:
        super().__init__(name, gate)
        self.num_outputs, self.enters = num_outputs, enters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns its input, or the hidden states that came in where the stage has no block."""
        states = self.gate.take() if self.enters else first_tensor(args, kwargs)
        if self.num_outputs is None:
            return states
        return (states, *[None] * (self.num_outputs - 1))


class AbsentLater(_Absent):
    """A block of a later stage: what it is called with leaves the stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the forward pass."""
        raise StageExit(first_tensor(args, kwargs))


@dataclass(frozen=True, slots=True)
class Border:
    """Whether hidden states enter at a block, and whether they leave behind it."""

    gate: Gate
    enters: bool
    leaves: bool


class BorderBlock:
    """What the class of the first and of the last block of a stage is preceded by.

    `__call__` and not a hook: a recomputation of the block's forward pass must not see the gate, and FSDP2 casts what a
    block is called with.
    """

    _border: Border

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the block with the hidden states that came in."""
        border = self._border
        if border.enters:
            replaced, kwargs = with_first_tensor(args, kwargs, border.gate.take())
            output = super().__call__(*replaced, **kwargs)  # type: ignore[misc]
        else:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if border.leaves:
            raise StageExit(output[0] if isinstance(output, tuple) else output)
        return output


def _used_elsewhere(name: str, when: str) -> TrainingError:
    return TrainingError(
        f"{name!r} is used {when}, and lies in another stage",
        code="FG754",
        hint="make modules in the order in which the model calls them, or train without a pipeline",
    )
