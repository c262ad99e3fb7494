"""Windows of other sizes: a window of the run, with more or fewer rows.

A trace needs shapes, not rows. `reshaped` repeats the rows of a window, or leaves some of them out, so that one trainer
can be traced with many sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from forgather.errors import PlanError
from forgather.ml.types import Window

_MOST_MICRO_BATCHES = 2  # from the second one on, gradients exist before the forward pass


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """The size of a window.

    Args:
        rows: the number of rows of a micro-batch; None keeps those of the run.
        longest: whether all rows are as long as the longest row of the data, which memory is planned for; otherwise
            they are the first rows of the run, which time is planned for.
        tokens: the number of tokens of a row; None keeps those of the run.
        micro_batches: the number of micro-batches of an optimizer step; None keeps those of the run.
    """

    rows: int | None = None
    longest: bool = True
    tokens: int | None = None
    micro_batches: int | None = None


def reshaped(window: Window, shape: WindowShape) -> Window:
    """Returns a window of another size, with at most two micro-batches: later ones are like the second.

    More tokens than the window has are its tokens again, in the same order.

    Args:
        window: the window of a run.
        shape: the size.

    Raises:
        PlanError: FG997 if the tensors of a batch have no common number of rows, or of tokens, although a number is
            given.
    """
    batches = window.batches[:_MOST_MICRO_BATCHES]
    if shape.micro_batches is not None:
        batches = [*batches, *batches][: min(_MOST_MICRO_BATCHES, shape.micro_batches)]
    if shape.rows is not None:
        batches = [_resized(batch, 0, shape.rows) for batch in batches]
    if shape.tokens is not None:
        batches = [_resized(batch, 1, shape.tokens) for batch in batches]
    return replace(window, batches=batches)


def _resized(batch: Any, dim: int, size: int) -> Any:
    what = ("rows", "tokens")[dim]
    sizes = {item.shape[dim] for item in tree_iter(batch) if isinstance(item, Tensor) and item.dim() > dim}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensors"
        raise PlanError(
            f"the tensors of a batch have no common number of {what}: {found}",
            code="FG997",
            hint="plan the sizes one by one, with --set trainer_args.per_device_train_batch_size=...",
        )
    (present,) = sizes

    def resize(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.dim() <= dim or present == size:
            return item
        return item.index_select(dim, torch.arange(size) % present)

    return tree_map(resize, dict(batch) if isinstance(batch, Mapping) else batch)
