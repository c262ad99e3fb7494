"""Types that all modules under forgather/ml share.

This module imports no other module of Forgather, so callbacks, strategies and the trainer can use these types without
depending on one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAPPINGS = (dict, Mapping)
"""The types of mappings, for `isinstance`: `dict` first, because the check of an abstract class is Python."""

Batch = Mapping[str, Any] | Sequence[Any] | Tensor
"""The output of a collator: a mapping of inputs, a tuple of inputs whose last item is the labels, or a tensor."""


@dataclass(frozen=True, slots=True)
class PaddingBatch:
    """A batch that is computed but does not contribute: its loss and its gradients are zero.

    A rank without rows left computes such a batch, because every rank must take part in the collectives.

    Args:
        batch: the rows to compute. They also belong to the batch of another rank, where they contribute.
    """

    batch: Batch


class TrainOutput(NamedTuple):
    """The result of a training.

    Args:
        global_step: the number of optimizer steps since the start of the run, including the steps before a resume.
        training_loss: the mean of the step losses of the run. NaN if a finished run was resumed.
        metrics: the final metrics of the run, by name.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step.

    In the windows that the training loop gets, the counts are sums over all processes, and the batches are those of
    this rank.

    Args:
        batches: the micro-batches in order. The last window of an epoch may have fewer micro-batches.
        num_valid: the number of targets that contribute to the loss, over all micro-batches. It is a Python number if
            the batches are on the host, so that counting does not wait for a device.
        num_tokens: the number of input tokens, or of rows if the inputs are not token ids.
        num_rows: the number of rows.
        num_unpadded: the number of input tokens that are no padding.
        num_pairs: the number of pairs of tokens in the same document, in both orders; 0 if documents are not known.
        is_last: whether this rank has no further row in the epoch. Only the windows of virtual streams say so; they go
            on with padding until the last rank has no further row.
        is_full: whether this rank has a row in each place of the micro-batches.
        counts: the copy of the sums of all counts that is on its way to the host; None if the counts are sums already.
            It belongs to the window, because several windows may be under way at once.

    Shapes:
        num_valid: a scalar, if it is a tensor.
    """

    batches: list[Any]
    num_valid: float | Tensor
    num_tokens: int
    num_rows: int
    num_unpadded: int = 0
    num_pairs: int = 0
    is_last: bool = False
    is_full: bool = True
    counts: Any = None


@dataclass(slots=True)
class Update:
    """The result of one optimizer step.

    Args:
        grad_norm: the norm of all gradients before clipping. None if the norm was not measured.
        skipped: True if the optimizer step was skipped.

    Shapes:
        grad_norm: a scalar tensor.
    """

    grad_norm: Tensor | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measurements of one optimizer step, which callbacks with a method `on_step_record` get.

    Args:
        step: the number of the step, counted from 1.
        loss: the loss over all data-parallel ranks; None if the step has none, as a skipped one.
        grad_norm: the norm of all gradients before clipping; None if it was not computed.
        bad: a description of what was wrong with a step that changed no weights; None for any other step.
        num_tokens: the number of input tokens over all ranks, or of rows if the inputs are not token ids.
        data_seconds: the time in which this rank waited for its own rows.
        forward_backward_seconds: the time of the forward and backward passes, with the communication in them.
        sync_seconds: the time of the sums over ranks of target counts and losses.
        update_seconds: the time of the optimizer step.

    Units:
        seconds of wall time on the host of this rank, which is ahead of an accelerator.
    """

    step: int
    loss: float | None
    grad_norm: float | None = None
    bad: str | None = None
    num_tokens: int = 0
    data_seconds: float = 0.0
    forward_backward_seconds: float = 0.0
    sync_seconds: float = 0.0
    update_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of the step without evaluations, log lines and saves, in seconds."""
        return self.data_seconds + self.forward_backward_seconds + self.sync_seconds + self.update_seconds


class Evaluated(NamedTuple):
    """The evaluation of one micro-batch.

    Args:
        loss: the sum of the losses of the valid targets. 0 on a rank that does not compute the loss.
        num_valid: the number of targets that contribute to the loss.
        output: the output of the model without the loss. None on a rank that does not have the last stage of a
            pipeline.

    Shapes:
        loss: a scalar tensor; num_valid: a scalar, if it is a tensor.
    """

    loss: Tensor
    num_valid: float | Tensor
    output: Any


@dataclass(frozen=True, slots=True)
class Topology:
    """The position of this rank among all ranks.

    Args:
        rank: the global rank.
        world_size: the number of ranks.
        device: the device that this rank computes on.
        is_writer: True on the main process, which writes files.
        local_rank: the rank among the processes on the same machine.
        dp_rank: the data-parallel rank. All ranks of one model replica (under pipeline or tensor parallelism) have the
            same data-parallel rank and read the same rows.
        dp_size: the number of data-parallel ranks.
        cp_rank: the context-parallel rank, which says which positions of the rows this rank computes.
        cp_size: the number of context-parallel ranks.
        has_loss: True if this rank computes the loss. With a pipeline, only the ranks with the last stage do.
        pp_rank: the pipeline rank. 0 without a pipeline.
        fixed_rows: True if every micro-batch must have as many rows as the first one. A shorter micro-batch is padded
            with rows whose labels are ignored.
    """

    rank: int
    world_size: int
    device: torch.device
    is_writer: bool
    local_rank: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    has_loss: bool = True
    pp_rank: int = 0
    fixed_rows: bool = False
