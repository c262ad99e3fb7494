"""What changed in the training data since a checkpoint, and whether a stream gives the same rows again.

Takes the facts and fingerprints of a checkpoint and of this run; gives sentences about the changes, as an error or a
warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from forgather.errors import CheckpointError
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.trainer.batch_sampler import PreparedBatch

_log = get_logger(__name__)
T = TypeVar("T")


def order_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns descriptions of the changes that affect the order or the number of the rows of an epoch.

    Args:
        before: the number of rows, the seed and similar values, as the checkpoint stores them.
        now: the same values of the current run.
    """
    facts = ["num_rows", "seed", "shuffled", "group_rows", "order_rule", "streams"]
    if "streams" not in now and "streams" not in before and "workers" in now and (before["workers"] or now["workers"]):
        facts += ["workers", "batch_rows"]  # each worker reads a part of a stream, one micro-batch at a time
    shown = [(name, _shown(before.get(name)), _shown(now.get(name))) for name in facts]
    return [f"{name} {then}, now {later}" for name, then, later in shown if then != later]


def _shown(fact: Any) -> str:
    if isinstance(fact, Mapping):
        order = "in order" if fact.get("order") is None else f"in the order of seed {fact['order']}"
        return f"{fact['number']} with blocks of {plural(fact['block_rows'], 'row')} {order}"
    return str(fact)


def changes_since_earlier_release(has_boundaries: bool) -> list[str]:
    """Returns descriptions of how the data differs from that of a checkpoint without a fingerprint.

    A warning reports that rows could not be compared.

    Args:
        has_boundaries: whether the rows have the document boundaries that `tokenize` writes in this release.
    """
    _log.warning(
        "the checkpoint was written by an earlier release, which recorded no digests of the training rows: only their "
        "number and order were compared"
    )
    if not has_boundaries:
        return []
    return [
        "the rows have document boundaries now, and 'tokenize' of an earlier release wrote none: "
        "document_boundaries: false gives the earlier rows"
    ]


def report_data_changes(changed: list[str], *, may_change: bool) -> None:
    """Reports changes of the training data: a warning if changes are allowed, otherwise an error.

    Args:
        changed: the descriptions of the changes; if there are none, nothing is reported.
        may_change: whether changes are allowed.

    Raises:
        CheckpointError: FG610 if the data changed and changes are not allowed.
    """
    what = f"the training data changed since the checkpoint: {'; '.join(changed)}"
    if changed and not may_change:
        raise CheckpointError(
            what,
            code="FG610",
            hint="resume with the same data, made in the same way; if the change is intended, resume with "
            "--allow-changed data (allow_changed: [data]): rows may then be read twice or not at all in this epoch",
        )
    if changed:
        _log.warning("%s: rows may be read twice or not at all in this epoch", what)


def after_first(items: Iterator[T], act: Callable[[], None]) -> Iterator[T]:
    """Yields all items, and calls `act` after the first item was read and before it is yielded.

    Args:
        items: the items, which are yielded unchanged.
        act: the function to call. If it raises an error, no item is yielded.
    """
    for number, item in enumerate(items):
        if number == 0:
            act()
        yield item


def batch_digest(batch: Any) -> str | None:
    """Returns a digest of all tensors of a micro-batch; None if the micro-batch contains no tensors."""
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


def after_matching_batch(items: Iterator[PreparedBatch], expected: str) -> Iterator[PreparedBatch]:
    """Drops the first micro-batch and returns all others; warns if the first one does not have the expected digest.

    Args:
        items: the micro-batches; the first one was trained on before the checkpoint was written.
        expected: the digest of the first micro-batch, as the checkpoint stores it.
    """
    first = next(items, None)
    if first is None or batch_digest(first.batch) != expected:
        _log.warning(
            "the training data gives other rows than before the checkpoint: rows may be read twice or not at all in "
            "this epoch; a data set without a length must give the same rows again (give its shuffling a seed)"
        )
    return items
