"""`PipelineTrainer`: pipeline parallelism, with the stages of a model on several ranks.

Takes what `Trainer` takes, with `PipelineTrainingArguments`; gives the same run on several processes. The class only
chooses a strategy; the arguments alone decide how.
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
    """Trains a model whose layers are split into stages on several processes.

    `args` is a `PipelineTrainingArguments`; all other parameters are those of `Trainer`.

    Raises:
        DistributedError: FG704 where the parallel sizes do not multiply to the number of processes, FG760 and FG761 for
            stages and micro-batches that do not fit the schedule.
        TrainingError: FG750 to FG755 for a model that cannot be split this way, FG762 for a loss that needs the whole
            model.
    """

    args: PipelineTrainingArguments
    ARGUMENTS = PipelineTrainingArguments
    RULES = door.rules("pipeline_trainer", "forgather.ml:PipelineTrainer")

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns the pipeline strategy of these arguments, with FSDP2 over data-parallel ranks if `fsdp` is set."""
        args = self.args
        sizes: dict[str, Any] = {"pipeline": args.pipeline_parallel_size, "tensor": args.tensor_parallel_size}
        layout = Layout.of(environment.world_size, data=args.data_parallel_size, **sizes)
        sharding = Sharding.of(args.fsdp, args.fsdp_config) if args.fsdp else None
        if sharding is not None and sharding.strategy != "NO_SHARD":
            replicas = environment.local_world_size // args.tensor_parallel_size
            shared = sharding.shared_by(layout.data_parallel_size, replicas)
            # Made twice: the shard size follows from the data-parallel size, which the first layout computed.
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
