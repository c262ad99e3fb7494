"""Whether a run that goes on has the data that it had before.

Takes what is known of the data before and now, and micro-batches; gives an error, or one line where other data are
meant. Keeps true: a micro-batch is hashed when a checkpoint is written or resumed, and never else; one without tensors
is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from forgather.errors import CheckpointError
from forgather.ml.log import get_logger
from forgather.ml.trainer.shares import Ready

_log = get_logger(__name__)

T = TypeVar("T")


def other_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns, in words, what has the rows of an epoch come in another order, or makes them more or fewer."""
    facts = ["num_rows", "seed", "shuffled"]
    if "workers" in now and (before["workers"] or now["workers"]):
        facts += ["workers", "batch_rows"]  # workers share a stream among them by micro-batches
    return [f"{name} {before.get(name)}, now {now.get(name)}" for name in facts if before.get(name) != now.get(name)]


def since_an_earlier_release(has_boundaries: bool) -> list[str]:
    """Returns, in words, what differs from a checkpoint that does not tell its rows, and says that it does not.

    Args:
        has_boundaries: the rows are now those of `tokenize` with document boundaries.
    """
    _log.warning(
        "the checkpoint is of an earlier release, and does not tell which rows its training data had: their number and "
        "order alone were compared"
    )
    if not has_boundaries:
        return []
    return [
        "the rows have document boundaries now, and 'tokenize' of an earlier release made none: with "
        "document_boundaries: false it makes the rows of that time"
    ]


def say_changed(changed: list[str], *, may_change: bool) -> None:
    """Tells what has changed of the training data, if anything has.

    Raises:
        CheckpointError: FG610 where nothing may change.
    """
    what = f"the training data changed since the checkpoint: {'; '.join(changed)}"
    if changed and not may_change:
        raise CheckpointError(
            what,
            code="FG610",
            hint="go on with the same data, made in the same way; or, where other rows are meant, with "
            "--allow-changed data (allow_changed: [data]): rows may be met twice or not at all in this epoch then",
        )
    if changed:
        _log.warning("%s: rows may be met twice or not at all in this epoch", what)


def after_first(items: Iterator[T], act: Callable[[], None]) -> Iterator[T]:
    """Yields items; `act` is called once the first of them is there."""
    for number, item in enumerate(items):
        if number == 0:
            act()
        yield item


def digest_of(batch: Any) -> str | None:
    """Returns a digest of the tensors of a micro-batch; None where there are none."""
    parts = [batch[name] for name in sorted(batch)] if isinstance(batch, Mapping) else batch
    parts = parts if isinstance(parts, list | tuple) else [parts]
    tensors = [part.detach().cpu() for part in parts if isinstance(part, Tensor)]
    if not tensors:
        return None
    hashed = xxhash.xxh3_64()
    for tensor in tensors:
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def after_the_same(items: Iterator[Ready], expected: str) -> Iterator[Ready]:
    """Returns the micro-batches after the first, and says so where that one is not what it was."""
    first = next(items, None)
    if first is None or digest_of(first.batch) != expected:
        _log.warning(
            "the training data gives other rows than before the checkpoint: rows may be met twice or not at all in "
            "this epoch; a data set without a length must give the same rows again (give its shuffling a seed)"
        )
    return items
