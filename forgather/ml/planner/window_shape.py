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
        micro_batches: the number of micro-batches of an optimizer step; None keeps those of the run.
    """

    rows: int | None = None
    longest: bool = True
    micro_batches: int | None = None


def reshaped(window: Window, shape: WindowShape) -> Window:
    """Returns a window of another size, with at most two micro-batches: later ones are like the second.

    Args:
        window: the window of a run.
        shape: the size.

    Raises:
        PlanError: FG997 if the tensors of a batch have no common number of rows, although a number is given.
    """
    batches = window.batches[:_MOST_MICRO_BATCHES]
    if shape.micro_batches is not None:
        batches = [*batches, *batches][: min(_MOST_MICRO_BATCHES, shape.micro_batches)]
    if shape.rows is not None:
        batches = [_resized(batch, shape.rows) for batch in batches]
    return replace(window, batches=batches)


def _resized(batch: Any, rows: int) -> Any:
    sizes = {len(item) for item in tree_iter(batch) if isinstance(item, Tensor) and item.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensors"
        raise PlanError(
            f"the tensors of a batch have no common number of rows: {found}",
            code="FG997",
            hint="plan the sizes one by one, with --set trainer_args.per_device_train_batch_size=...",
        )
    (present,) = sizes

    def resize(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.dim() or present == rows:
            return item
        return item.index_select(0, torch.arange(rows) % present)

    return tree_map(resize, dict(batch) if isinstance(batch, Mapping) else batch)
