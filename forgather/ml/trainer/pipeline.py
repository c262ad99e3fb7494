"""`PipelineTrainer`: a model in stages that lie on several ranks.

Takes what `Trainer` takes, with `PipelineTrainingArguments`; gives the same run on several processes. Keeps true: it
is a choice of strategy, by the arguments alone.
"""

from __future__ import annotations

from typing import Any

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.pipeline.strategy import Pipeline
from forgather.ml.trainer import argument_checks as door
from forgather.ml.trainer.parallel_arguments import PipelineTrainingArguments
from forgather.ml.trainer.trainer import Trainer


class PipelineTrainer(Trainer):
    """Trains a model whose layers lie on several processes.

    `args` is a `PipelineTrainingArguments`; everything else is that of `Trainer`.

    Raises:
        DistributedError: FG704 for sizes that do not make the processes that run, FG760 and FG761 for stages and
            micro-batches that do not fit the schedule.
        TrainingError: FG750 to FG755 for a model that cannot be cut so, FG762 for one whose loss needs all of it.
    """

    args: PipelineTrainingArguments
    ARGUMENTS = PipelineTrainingArguments
    RULES = door.rules("pipeline_trainer", "forgather.ml:PipelineTrainer")

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns how updates are computed."""
        args = self.args
        sizes: dict[str, Any] = {"pipeline": args.pipeline_parallel_size, "tensor": args.tensor_parallel_size}
        layout = Layout.of(environment.world_size, data=args.data_parallel_size, **sizes)
        sharding = Sharding.of(args.fsdp, args.fsdp_config) if args.fsdp else None
        if sharding is not None and sharding.strategy != "NO_SHARD":
            replicas = environment.local_world_size // args.tensor_parallel_size
            shared = sharding.shared_by(layout.data_parallel_size, replicas)
            layout = Layout.of(environment.world_size, data=layout.data_parallel_size, shard=shared, **sizes)
        else:
            sharding = None
        return Pipeline(
            environment,
            layout,
            rows=args.per_device_train_batch_size,
            schedule_class=args.schedule_class,
            split_spec=args.split_spec,
            pipeline_chunks=args.pipeline_chunks,
            stages_per_rank=args.stages_per_rank,
            checkpoint_sequential=args.checkpoint_sequential,
            sharding=sharding,
            tp_plan=args.tp_plan,
            use_cpu=args.use_cpu,
        )
