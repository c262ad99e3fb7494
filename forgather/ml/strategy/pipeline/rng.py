"""Random numbers of the stages: each stage and replica has its own, data loading is not disturbed.

Takes the position of a rank; gives a context in which a stage draws. Keeps true: the ranks of one replica share the
global random numbers, from which a collator may draw, so that they go on reading the same batches; restoring those
restores the numbers of every stage.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class StageRandomness:
    """The random numbers of the passes on one rank.

    Args:
        replica: which replica this is.
        position: position of this rank in the pipeline.
        draws: whether the model draws at all; where it does not, nothing is touched.
    """

    def __init__(self, *, replica: int, position: int, draws: bool) -> None:
        self.replica = replica
        self.position = position
        self.draws = draws

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Runs its body with random numbers of this rank; every rank of the pipeline enters as often as the others."""
        if not self.draws:
            yield
            return
        # One draw from the numbers that all ranks of the replica share: what a checkpoint holds is enough to go on.
        shared = int(torch.randint(2**62, (), dtype=torch.int64))
        kept = torch.get_rng_state()
        text = f"{shared} {self.replica} {self.position}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        try:
            yield
        finally:
            torch.set_rng_state(kept)


def draws_random_numbers(model: nn.Module, config: Any = None) -> bool:
    """Tells whether a model in training draws: a dropout of more than zero, as a module or in its configuration."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
            return True
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    words = ("drop", "noise", "jitter")
    return any(
        isinstance(value, float) and value > 0 and any(word in name for word in words)
        for name, value in settings.items()
    )
