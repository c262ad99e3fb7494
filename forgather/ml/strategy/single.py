"""One process, one device.

Takes a recipe and windows; gives losses and updates of the model on the device. Keeps true: nothing here waits for the
device, and an update equals the one a plain torch loop would make, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from forgather.errors import DistributedError
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.types import Topology


class SingleDevice(ModelStrategy):
    """The strategy of one process.

    Args:
        environment: who this process is.
        use_cpu: compute on the CPU though there is an accelerator.

    Raises:
        DistributedError: FG703 where several processes were started.
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
    """Returns the strategy of `TrainingArguments`."""
    return SingleDevice(environment, use_cpu=args.use_cpu)
