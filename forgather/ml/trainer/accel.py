"""`AccelTrainer`: data parallelism over Accelerate.

Takes what `Trainer` takes, with `AccelTrainingArguments`; gives the same run on several processes. Keeps true: it is a
choice of strategy, by the arguments alone.
"""

from __future__ import annotations

from accelerate.utils import DistributedDataParallelKwargs

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.data_parallel import DataParallel, DataParallelSettings
from forgather.ml.strategy.deepspeed import deepspeed_strategy
from forgather.ml.trainer import arguments_check as door
from forgather.ml.trainer.parallel_args import AccelTrainingArguments
from forgather.ml.trainer.trainer import Trainer


class AccelTrainer(Trainer):
    """Trains a model on several processes, each of which sees other rows.

    `args` is an `AccelTrainingArguments`; everything else is that of `Trainer`.

    Raises:
        DistributedError: FG704 for sizes that do not make the processes that run, FG722 where Accelerate became
            something else than what was asked for.
    """

    args: AccelTrainingArguments
    ARGUMENTS = AccelTrainingArguments
    RULES = door.rules("accel_trainer", "forgather.ml:AccelTrainer")

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns how updates are computed."""
        args = self.args
        layout = Layout.of(environment.world_size, data=args.data_parallel_size, tensor=args.tensor_parallel_size)
        if args.deepspeed is not None:
            return deepspeed_strategy(args, environment, layout)
        settings = DataParallelSettings(ddp=ddp_settings(args))
        return DataParallel(environment, layout, settings=settings, use_cpu=args.use_cpu)


def ddp_settings(args: AccelTrainingArguments) -> DistributedDataParallelKwargs:
    """Returns the settings of DistributedDataParallel that the arguments give; its own defaults for the rest."""
    given = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return DistributedDataParallelKwargs(**{name: value for name, value in given.items() if value is not None})
