"""`PipelineTrainer`: pipeline parallelism, with the stages of a model on several ranks.

`PipelineTrainer` takes the same parameters as `Trainer`, with `PipelineTrainingArguments` as `args`, and runs the same
training on several processes. The class only chooses the pipeline strategy. All its settings come from the arguments.
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
        DistributedError: FG704 if the product of the parallel sizes is not the number of processes; FG760 or FG761 if
            the number of stages or micro-batches does not fit the schedule.
        TrainingError: FG750 to FG755 if the model cannot be split as requested; FG762 if the loss needs the whole
            model.
    """

    args: PipelineTrainingArguments
    ARGUMENTS = PipelineTrainingArguments
    RULES = argument_checks.rules("pipeline_trainer", "forgather.ml:PipelineTrainer")

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns the pipeline strategy, which uses FSDP2 over the data-parallel ranks if `fsdp` is set."""
        return make_strategy(environment, self.args)
