"""`PipelineTrainer`: pipeline parallelism, with the stages of a model on several ranks.

Takes what `Trainer` takes, with `PipelineTrainingArguments`; gives the same run on several processes. The class only
chooses a strategy; the arguments alone decide how.
"""

from __future__ import annotations

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.registry import make_strategy
from forgather.ml.trainer import argument_checks
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
    RULES = argument_checks.rules("pipeline_trainer", "forgather.ml:PipelineTrainer")

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns the pipeline strategy of these arguments, with FSDP2 over data-parallel ranks if `fsdp` is set."""
        return make_strategy(environment, self.args)
