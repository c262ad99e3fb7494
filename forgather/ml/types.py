"""Nouns that every layer of the ML tower shares.

Takes and gives nothing: names only. Keeps true: nothing of ours is imported here, so that callbacks,
strategies and the trainer do not need one another to speak of a batch or of a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""What a collator gives: a mapping of inputs, a tuple of inputs with the labels last, or one tensor."""


@dataclass(frozen=True, slots=True)
class PaddingBatch:
    """A batch that is computed and counts for nothing.

    A process without rows left takes part in what all processes do together with one: its loss is zero, and so are
    its gradients, whatever the loss and the form of the batch.

    Args:
        batch: rows that other processes count.
    """

    batch: Batch


class TrainOutput(NamedTuple):
    """What a training gives back.

    Args:
        global_step: optimizer updates done since the run's origin.
        training_loss: mean of the step losses of the run; NaN where a finished run was resumed.
        metrics: the closing summary, under plain names.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer update.

    Args:
        batches: micro-batches in order; the last window of an epoch may be short.
        num_valid: targets that count towards the loss, over all micro-batches; a number on the host
            where the batches lie there, so that counting never waits for a device.
        num_tokens: input tokens (or rows, where the inputs are no token ids).
        num_rows: rows.

    The loop gets windows whose counts are those of all processes, and whose batches are this process's own.
    """

    batches: list[Any]
    num_valid: float | Tensor
    num_tokens: int
    num_rows: int


@dataclass(slots=True)
class Update:
    """What one optimizer update was.

    Args:
        grad_norm: norm of all gradients before clipping; None where nobody asked for it.
        skipped: True where the update was left out.
    """

    grad_norm: Tensor | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """Who this process is among its peers.

    Args:
        rank: position among all processes.
        world_size: number of processes.
        device: where this process computes.
        is_writer: True for the one process that writes files.
        local_rank: position among the processes of this machine.
        dp_rank: which share of the rows this process reads; the ranks of one replica read the same.
        dp_size: number of such shares.
        has_loss: True where the loss is computed: the last stage of a pipeline, and every process without one.
        pp_rank: which part of the model lies here; 0 where it is whole.
        fixed_rows: True where every micro-batch must have as many rows as the first: short ones are filled up with
            rows whose labels are ignored.
    """

    rank: int
    world_size: int
    device: torch.device
    is_writer: bool
    local_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    has_loss: bool = True
    pp_rank: int = 0
    fixed_rows: bool = False
