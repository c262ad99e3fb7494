"""A forward pass over the stages, without gradients: for evaluation and for text.

Takes inputs, gives the output of the last stage on the rank that holds it. Keeps true: it works for every placement
of stages and every shape of inputs, changes no buffer of a schedule, and sharded weights are sharded again
afterwards; a rank goes on to its next batch while later stages still compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from forgather.ml.strategy.pipeline.microbatch_split import StepInputs
from forgather.ml.strategy.pipeline.schedules import Placement

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_MAX_DIMS = 6
_MAX_TENSORS = 4
_HEADER = 1 + _MAX_TENSORS * (2 + _MAX_DIMS)


class ForwardPass:
    """The stages as one function.

    Args:
        stages: the stage modules of this rank by number.
        placement: where all stages lie.
        group: the process group of the pipeline.
        device: where this rank computes.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], *, placement: Placement, group: Any, device: torch.device
    ) -> None:
        self.stages = stages
        self.placement = placement
        self.group = group
        self.device = device
        self._under_way: list[Any] = []

    def __call__(self, inputs: StepInputs) -> Any:
        """Returns the output of the model where the last stage lies, None elsewhere; every rank calls it."""
        output: Any = None
        carried: tuple[Tensor, ...] = ()
        last = self.placement.num_stages - 1
        for index, stage in sorted(self.stages.items()):
            if index == 0:
                carried = inputs.first
            elif index - 1 not in self.stages:
                carried = self._receive(self.placement.rank_of(index - 1))
            found = stage(*carried, **inputs.every)
            if index == last:
                output = found
                break
            carried = tuple(found) if isinstance(found, tuple | list) else (found,)
            if index + 1 not in self.stages:
                self._send(carried, self.placement.rank_of(index + 1))
        self._shard_again()
        return output

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        # One batch under way at most: a fast first stage would otherwise fill the memory.
        self.finish()
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0] = len(tensors)
        for number, tensor in enumerate(tensors):
            start = 1 + number * (2 + _MAX_DIMS)
            header[start] = _DTYPES.index(tensor.dtype)
            header[start + 1] = tensor.ndim
            header[start + 2 : start + 2 + tensor.ndim] = torch.tensor(tensor.shape)
        for tensor in (header.to(self.device), *(tensor.detach().contiguous() for tensor in tensors)):
            # The work does not keep the tensor alive on every backend.
            self._under_way.append(_Sent(dist.isend(tensor, group=self.group, group_dst=rank), tensor))

    def _receive(self, rank: int) -> tuple[Tensor, ...]:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=rank)
        facts = header.tolist()
        tensors = []
        for number in range(facts[0]):
            start = 1 + number * (2 + _MAX_DIMS)
            shape = facts[start + 2 : start + 2 + facts[start + 1]]
            tensor = torch.empty(shape, dtype=_DTYPES[facts[start]], device=self.device)
            dist.recv(tensor, group=self.group, group_src=rank)
            tensors.append(tensor)
        return tuple(tensors)

    def _shard_again(self) -> None:
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


class _Sent:
    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.work, self.tensor = work, tensor

    def wait(self) -> None:
        self.work.wait()
