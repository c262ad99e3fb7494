"""Types shared by all layers of the ML tower.

Nothing of Forgather is imported here, so that callbacks, strategies and the trainer can use these types without
depending on one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""The result of a collator: a mapping of inputs, a tuple of inputs with the labels last, or a tensor."""


@dataclass(frozen=True, slots=True)
class PaddingBatch:
    """A batch that is computed but counts for nothing: its loss and its gradients are zero.

    A process without rows left computes one, because every process must take part in the collectives.

    Args:
        batch: rows that other processes count.
    """

    batch: Batch


class TrainOutput(NamedTuple):
    """The result of a training.

    Args:
        global_step: optimizer steps since the run's origin.
        training_loss: mean of the step losses of the run; NaN if a finished run was resumed.
        metrics: the final summary by name.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step.

    The training loop gets windows with the counts of all processes and the batches of this process.

    Args:
        batches: micro-batches in order; the last window of an epoch may be short.
        num_valid: targets that count for the loss, over all micro-batches; a Python number if the batches are on the
            host, so that counting does not wait for a device.
        num_tokens: input tokens (rows, if the inputs are not token ids).
        num_rows: rows.

    Shapes:
        num_valid: scalar.
    """

    batches: list[Any]
    num_valid: float | Tensor
    num_tokens: int
    num_rows: int


@dataclass(slots=True)
class Update:
    """The result of one optimizer step.

    Args:
        grad_norm: norm of all gradients before clipping; None if it was not requested.
        skipped: True if the optimizer step was skipped.

    Shapes:
        grad_norm: scalar.
    """

    grad_norm: Tensor | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """The position of this process among all processes.

    Args:
        rank: of this process.
        world_size: number of processes.
        device: on which this process computes.
        is_writer: True for the main process, which writes files.
        local_rank: rank among the processes of this machine.
        dp_rank: data-parallel rank; the ranks of one model replica (pipeline, tensor parallel) have the same one and
            read the same rows.
        dp_size: number of data-parallel ranks.
        has_loss: True if this process computes the loss: in the last stage of a pipeline, and without a pipeline.
        pp_rank: pipeline rank; 0 without a pipeline.
        fixed_rows: True if every micro-batch must have as many rows as the first: short ones are padded with rows whose
            labels are ignored.
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
