"""`GRPOTrainer` and `RLOOTrainer`: TRL's trainers, with model, adapter, optimizer, rewards and callbacks from a config.

The steps, the files of checkpoints and the order of random numbers are those of TRL. A run starts, stops, resumes and
reports as `TransformersRun` says. This is the one module that imports trl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trl
from accelerate.utils import set_seed
from torch import Tensor, device, nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from forgather.ml.adapters import as_adapter
from forgather.ml.distributed.env import device_for_deepspeed_imports
from forgather.ml.models import refuse_missing_reference
from forgather.ml.reward_function import reward_functions
from forgather.ml.task import Task
from forgather.ml.trainer import argument_checks
from forgather.ml.trainer.model_setup import keep_differentiable
from forgather.ml.trainer.transformers_run import TransformersRun

_RULES = argument_checks.rules("rl_trainer", "forgather.ml.trainer.rl:GRPOTrainer")


class RewardedRun(TransformersRun):
    """A trainer of TRL that generates answers and learns from their rewards.

    Args:
        model: the model to train.
        args: the training arguments of TRL, such as `trl.GRPOConfig`.
        reward_funcs: a reward function, a reward model, or a list of these; see `RewardFunction`.
        optimizer_factory: the optimizer factory, as in `forgather.ml:Trainer`; None uses `args.optim`.
        lr_scheduler_factory: the factory of the learning rate schedule, as in `forgather.ml:Trainer`; None uses
            `args.lr_scheduler_type`.
        callbacks: the callbacks. If there are any, they replace the progress bar and the printer of transformers.
        adapter: the adapter that is put into the model, as in `forgather.ml:Trainer`.
        loss_fn: must be None: the loss is that of TRL.
        compute_metrics: must be None: TRL keeps no predictions.
        **others: the keyword arguments of the trainer of TRL, such as `train_dataset`.

    Raises:
        AdapterError: FG900 to FG905 or FG908 if the adapter cannot be put into the model.
        SettingError: FG985 if a setting does not fit this trainer.
        RewardError: FG986 if a reward function cannot be used.
        TrainingError: FG987 if `beta` needs a reference model, and TRL could load none.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        reward_funcs: Any = None,
        optimizer_factory: Callable[..., Optimizer] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        adapter: Any = None,
        loss_fn: Any = None,
        compute_metrics: Any = None,
        **others: Any,
    ) -> None:
        found = {"loss_fn": loss_fn, "compute_metrics": compute_metrics}
        found |= {f"args.{name}": getattr(args, name, None) for name in ("fsdp", "deepspeed")}
        argument_checks.raise_first_error(_RULES.broken(found, found))
        columns = set(getattr(others.get("train_dataset"), "column_names", None) or ()) - {"prompt"}
        rewards = reward_functions(reward_funcs, sorted(columns))
        if (wanted := as_adapter(adapter)) is None:
            refuse_missing_reference(model, args.beta)
        elif wanted.path is not None:
            model = wanted.apply(model, seed=args.seed)  # TRL keeps a frozen copy of it as the reference
        else:
            others["peft_config"] = wanted.config_for(model)
        # TRL generates in evaluation mode before each step.
        keep_differentiable(model)
        events = self._prepare_run(args, optimizer_factory, lr_scheduler_factory, callbacks)
        # transformers may import DeepSpeed, which would search for an accelerator and print a warning.
        with device_for_deepspeed_imports():
            trained: Any = super()  # the next class is the trainer of TRL
            trained.__init__(model=model, reward_funcs=rewards, args=args, callbacks=events, **others)
        args.task = Task()  # the loss is not a cross-entropy, and the number of tokens is not known before a step
        self._finish_preparation(callbacks)

    def _seed_run(self) -> None:
        # As TRL seeds at the end of its constructor: processes with equal seeds would write equal answers.
        set_seed(self.args.seed, device_specific=True)

    def _send_telemetry(self) -> None:
        """Sends nothing: a run opens no connection of its own."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: device) -> tuple[list[Any], Any]:
        """Returns the micro-batches of an optimizer step; counts the answers for the logs.

        Args:
            epoch_iterator: the iterator over the micro-batches of the epoch.
            num_batches: the number of micro-batches of the optimizer step.
            device: the device of the divisor of the loss.
        """
        found: tuple[list[Any], Tensor | int | None] = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_rows += len(found[0]) * self.args.per_device_train_batch_size
        return found


class GRPOTrainer(RewardedRun, trl.GRPOTrainer):  # type: ignore[misc] # mypy runs without trl
    """`trl.GRPOTrainer` with the arguments of `RewardedRun`: answers to one prompt are compared with one another."""

    __init__ = RewardedRun.__init__


class RLOOTrainer(RewardedRun, trl.RLOOTrainer):  # type: ignore[misc]
    """`trl.RLOOTrainer` with the arguments of `RewardedRun`: each answer is compared with the mean of the others."""

    __init__ = RewardedRun.__init__
