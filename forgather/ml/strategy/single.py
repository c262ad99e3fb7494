"""The strategy of a single process on a single device."""

from __future__ import annotations

from typing import Any

import torch

from forgather.errors import DistributedError
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.types import Topology


class SingleDevice(ModelStrategy):
    """The strategy of a single process.

    Args:
        environment: the rank and the world size.
        use_cpu: True to compute on the CPU even if there is an accelerator.

    Raises:
        DistributedError: FG703 if several processes were started.
    """

    def __init__(self, environment: DistributedEnvironment, *, use_cpu: bool = False) -> None:
        if environment.world_size > 1:
            raise DistributedError(
                f"this trainer runs in one process, and there are {environment.world_size} "
                f"(this is rank {environment.rank})",
                code="FG703",
                hint="extend trainers/accel_trainer.yaml or trainers/pipeline_trainer.yaml, or start one process",
            )
        device = torch.device("cpu") if use_cpu else environment.device
        self.topology = Topology(rank=environment.rank, world_size=1, device=device, is_writer=True)


def single_strategy(environment: DistributedEnvironment, args: Any) -> SingleDevice:
    """Returns the single-process strategy for `TrainingArguments`.

    Args:
        environment: the rank and the world size.
        args: the training arguments.

    Raises:
        DistributedError: FG703 if several processes were started.
    """
    return SingleDevice(environment, use_cpu=args.use_cpu)
