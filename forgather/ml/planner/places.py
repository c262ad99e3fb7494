"""Where in a model an operator runs: the pass, and the repeated block.

`Places` takes the blocks of a model and gives the current `Region` at any time. In the backward pass, an operator
belongs to the block whose forward pass recorded the node of autograd that calls it: torch numbers nodes in the order of
the forward pass, so that the numbers of a block are a range.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from forgather.ml.planner.allocations import Region

BEFORE = -1
"""The block index of what runs before the first block, and outside of passes."""


class Places:
    """Context manager that follows the passes through a model by hooks on its blocks.

    Args:
        blocks: the repeated blocks of the model, in the order in which they run.

    Attributes:
        phase: the phase outside of a backward pass, which the caller sets: "forward", "update" or "evaluation".
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int]] = []
        self._block = BEFORE
        self._depth = 0
        self.phase = "forward"

    @property
    def recomputes(self) -> bool:
        """Whether a forward pass runs inside of a backward pass at the moment."""
        return self._depth > 0 and _in_backward()

    def region(self) -> Region:
        """Returns the current region."""
        if not _in_backward():
            return Region(self.phase, self._block if self.phase != "update" else BEFORE)
        node = torch._C._current_autograd_node()
        if node is None:
            # A callback of autograd after the last node, as FSDP2 registers one.
            return Region("backward", BEFORE)
        return Region("backward", self._block_of(node._sequence_nr()))

    def work_phase(self) -> str:
        """Returns the current phase, with "recompute" for a forward pass inside of a backward pass."""
        if not _in_backward():
            return self.phase
        # A backward pass records no gradients; what is recomputed does. Hooks may be outside of what is recomputed.
        return "recompute" if self._depth > 0 or torch.is_grad_enabled() else "backward"

    def _block_of(self, number: int) -> int:
        position = bisect.bisect_right(self._starts, number) - 1
        if position < 0:
            return BEFORE
        end, block = self._ranges[position]
        if number < end or block + 1 < len(self.blocks):
            return block
        return len(self.blocks)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Context manager in which the passes are followed."""
        handles: list[Any] = []
        for index, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(self._entering(index)))
            handles.append(block.register_forward_hook(self._leaving(index), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, index: int) -> Any:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._depth += 1
            self._block = index
            number = torch._C._autograd._get_sequence_nr()
            if not self._starts or number > self._starts[-1]:
                self._starts.append(number)
                self._ranges.append((number, index))

        return enter

    def _leaving(self, index: int) -> Any:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._depth -= 1
            if _in_backward():
                return
            if self._ranges:
                self._ranges[-1] = (torch._C._autograd._get_sequence_nr(), index)
            # What follows the last block is the output layer; between two blocks there is hardly anything.
            self._block = index + 1 if index + 1 == len(self.blocks) else index

        return leave

    def begin_pass(self, phase: str) -> None:
        """Notes that a pass or an update begins.

        Args:
            phase: "forward", "update" or "evaluation".
        """
        self.phase = phase
        self._block = BEFORE


@contextlib.contextmanager
def noting_width(local: nn.Module, blocks: Sequence[nn.Module], widths: list[int]) -> Iterator[None]:
    """Context manager in which the size of the last dimension of the logits on this rank is set in a list.

    The output layer is the last matrix outside of the blocks that runs in a forward pass. A stage of a pipeline has no
    other name for it.

    Args:
        local: the model, or the part of it on this rank.
        blocks: the repeated blocks.
        widths: the list, which has one item after a forward pass with an output layer.
    """
    inner = {id(module) for block in blocks for module in block.modules()}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        widths[:] = [output.shape[-1]]

    outer = (module for module in local.modules() if id(module) not in inner)
    handles = [module.register_forward_hook(note) for module in outer if isinstance(module, nn.Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
