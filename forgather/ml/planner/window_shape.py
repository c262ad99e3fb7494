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

_ONE_BY_ONE = "plan the sizes one by one, with --set trainer_args.per_device_train_batch_size=..."
_MOST_MICRO_BATCHES = 2  # from the second one on, gradients exist before the forward pass


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """The size of a window.

    Args:
        rows: the number of rows of a micro-batch; None keeps those of the run.
        longest: whether all rows are as long as the longest row of the data, which memory is planned for; otherwise
            they are the first rows of the run, which time is planned for.
        micro_batches: the number of micro-batches of an optimizer step; None keeps those of the run.
        length: the number of tokens of each row, for which rows of the data are repeated or cut; None keeps the rows.
    """

    rows: int | None = None
    longest: bool = True
    micro_batches: int | None = None
    length: int | None = None


def reshaped(window: Window, shape: WindowShape, rows: int) -> Window:
    """Returns a window of another size, with at most two micro-batches: later ones are like the second.

    Args:
        window: the window of a run.
        shape: the size.
        rows: the number of rows of the first micro-batch. A row may be several in the tensors, as a pair of answers is.

    Raises:
        PlanError: FG997 if the tensors of a batch have no common number of rows, or not a multiple of `rows`, although
            another number is given.
    """
    batches = window.batches[:_MOST_MICRO_BATCHES]
    if shape.micro_batches is not None:
        batches = [*batches, *batches][: min(_MOST_MICRO_BATCHES, shape.micro_batches)]
    if shape.rows is not None:
        # The last micro-batch of an epoch may be smaller, the first one is not.
        each, rest = divmod(_rows_of(batches[0]), rows)
        if rest or not each:
            raise PlanError(
                f"the tensors of a batch have {_rows_of(batches[0])} rows, which are made of {rows} rows of the data",
                code="FG997",
                hint=_ONE_BY_ONE,
            )
        batches = [_resized(batch, each * shape.rows) for batch in batches]
    return replace(window, batches=batches)


def _rows_of(batch: Any) -> int:
    sizes = {len(item) for item in tree_iter(batch) if isinstance(item, Tensor) and item.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "no tensors"
        raise PlanError(
            f"the tensors of a batch have no common number of rows: {found}", code="FG997", hint=_ONE_BY_ONE
        )
    return sizes.pop()


def _resized(batch: Any, rows: int) -> Any:
    present = _rows_of(batch)

    def resize(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.dim() or present == rows:
            return item
        return item.index_select(0, torch.arange(rows) % present)

    return tree_map(resize, dict(batch) if isinstance(batch, Mapping) else batch)
