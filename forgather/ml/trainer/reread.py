"""Whether a data set without positions gave the rows again that it gave before.

Takes micro-batches; gives digests of them, and one line where they differ. Keeps true: a micro-batch is hashed when a
checkpoint is written or resumed, and never else; what holds no tensors is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from forgather.ml.log import get_logger
from forgather.ml.trainer.shares import Ready

_log = get_logger(__name__)


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
