"""`AccelTrainer`: data-parallel, FSDP2, tensor-parallel and DeepSpeed training over Accelerate.

`AccelTrainer` takes the same parameters as `Trainer`, with `AccelTrainingArguments` as `args`, and runs the same
training on several processes. The class only chooses a strategy, and the arguments alone determine which one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Recipe, Strategy
from forgather.ml.strategy.deepspeed_config import second_schedule, written_settings, zero_config
from forgather.ml.strategy.deepspeed_settings import AUTO, ZeroConfig
from forgather.ml.strategy.registry import DDP, DEEPSPEED, entry_of, make_strategy
from forgather.ml.trainer import argument_checks
from forgather.ml.trainer.accelerate_words import refuse_other_processes
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.deepspeed_words import optimizer_factory as made_by
from forgather.ml.trainer.deepspeed_words import schedule_factory
from forgather.ml.trainer.parallel_arguments import AcceleratorSettings, AccelTrainingArguments, accelerator_settings
from forgather.ml.trainer.trainer import Trainer

_log = get_logger(__name__)


class AccelTrainer(Trainer):
    """Trains a model on several processes; each data-parallel rank computes different rows.

    `args` is an `AccelTrainingArguments`; all other parameters are those of `Trainer`.

    Raises:
        DistributedError: FG704 if the product of the parallel sizes is not the number of processes; FG722 if
            Accelerate's state differs from the requested one; FG724 if Accelerate's launcher requests another engine
            than the arguments do.
        SettingError: FG723 if a setting of `accelerator_args` is not supported.
    """

    args: AccelTrainingArguments
    ARGUMENTS = AccelTrainingArguments
    RULES = argument_checks.rules("accel_trainer", "forgather.ml:AccelTrainer")

    def factories(self, optimizer_factory: Any, lr_scheduler_factory: Any) -> tuple[Any, Any]:
        """Returns the factories of the optimizer and of the schedule; without any, those of the DeepSpeed config.

        Args:
            optimizer_factory: the optimizer factory as it was given to the constructor.
            lr_scheduler_factory: the factory of the schedule as it was given to the constructor.

        Raises:
            TrainingError: FG743 if there are two schedules, FG744 if DeepSpeed's one is not available.
        """
        # Arguments of another trainer are refused by the check that follows.
        asked = getattr(self.args, "deepspeed_config", None)
        if asked is None or asked == AUTO:
            return optimizer_factory, lr_scheduler_factory
        scheduled = schedule_factory(asked, self.args)
        if scheduled is not None and lr_scheduler_factory is not None:
            found = ZeroConfig(config=written_settings(asked), source="the deepspeed config")
            raise second_schedule(found, "lr_scheduler_factory").about("args.deepspeed")
        return optimizer_factory or made_by(asked), lr_scheduler_factory or scheduled

    def _recipe(self, *args: Any) -> Recipe:
        return dataclasses.replace(
            super()._recipe(*args),
            context_method=self.args.context_parallel_method,
            rotate_method=self.args.context_parallel_rotate_method,
        )

    def choose_strategy(self, environment: DistributedEnvironment) -> Strategy:
        """Returns the strategy that the arguments select: DeepSpeed, FSDP2 (with or without tensor parallelism) or DDP.

        Raises:
            DistributedError: FG704 if the product of the parallel sizes is not the number of processes.
            SettingError: FG723 if settings contradict one another.
        """
        args = self.args
        refuse_other_processes(args.accelerate_config, environment.world_size)
        settings = accelerator_settings(args.accelerator_args)
        report_unused_handlers(settings, entry_of(args).engine)
        environment = with_group_settings(environment, settings, use_cpu=args.use_cpu)
        if args.deepspeed_replaced is not None:
            # DeepSpeed's config must be one that DeepSpeed itself would take here.
            replicas = environment.world_size // (args.tensor_parallel_size * args.context_parallel_size)
            on_cpu = args.use_cpu or environment.device.type == "cpu"
            found = zero_config(args.deepspeed_replaced, args, processes=replicas, on_cpu=on_cpu)
            for note in found.notes:
                _log.warning("deepspeed: %s", note)
        ddp = functools.partial(ddp_settings, args, settings.ddp)
        return make_strategy(
            environment, args, scaling=settings.scaling, sync_each_batch=settings.sync_each_batch, ddp=ddp
        )


def report_unused_handlers(settings: AcceleratorSettings, engine: str) -> None:
    """Logs which settings of `accelerator_args` the engine does not have, and refuses those that change numbers.

    Args:
        settings: the settings that were read from `accelerator_args`.
        engine: the name of the engine.

    Raises:
        SettingError: FG723 if there are settings of the loss scaler, and DeepSpeed scales the loss.
    """
    if settings.scaling and engine == DEEPSPEED:
        raise SettingError(
            "accelerator_args.kwargs_handlers has a GradScalerKwargs, and DeepSpeed scales the loss itself",
            code="FG723",
            hint="write its numbers into the fp16 section of deepspeed: initial_scale_power, loss_scale_window",
        ).about("args.accelerator_args")
    if engine == DDP:
        return
    for name, is_given in (
        ("kwargs_handlers: DistributedDataParallelKwargs", settings.ddp is not None),
        ("gradient_accumulation_plugin.sync_each_batch", settings.sync_each_batch),
    ):
        if is_given:
            _log.warning("accelerator_args.%s has no effect: %s trains, without DistributedDataParallel", name, engine)


def with_group_settings(
    environment: DistributedEnvironment, settings: AcceleratorSettings, *, use_cpu: bool
) -> DistributedEnvironment:
    """Returns the distributed environment, updated with the process-group settings of `accelerator_args`.

    Args:
        environment: the distributed environment of the calling process.
        settings: the settings that were read from `accelerator_args`.
        use_cpu: whether the run is forced onto the CPU.

    Raises:
        SettingError: FG723 if the backend in `settings` contradicts the backend of the environment.
    """
    if settings.timeout_seconds is not None:
        environment = dataclasses.replace(environment, timeout_seconds=settings.timeout_seconds)
        _log.warning(
            "accelerator_args: the timeout was taken as that of the process group: %g s", settings.timeout_seconds
        )
    # The same backend given twice is not a contradiction.
    if settings.backend is None or settings.backend == environment.backend:
        return environment
    if environment.backend != "auto":
        raise SettingError(
            f"accelerator_args.backend is {settings.backend!r}, and the backend of distributed_env is "
            f"{environment.backend!r}",
            code="FG723",
            hint="keep one of them",
        ).about("args.accelerator_args")
    # On the CPU the environment replaces a CUDA backend (nccl) by gloo, so the line reports the backend that is used.
    on_cpu = use_cpu or environment.device.type == "cpu"
    in_force = dataclasses.replace(environment, backend=settings.backend)
    _log.warning(
        "accelerator_args.backend was taken as that of the process group: %s%s",
        settings.backend,
        f"; on the CPU that is {in_force.on_cpu().backend}" if on_cpu and in_force.on_cpu() != in_force else "",
    )
    return in_force


_DEFAULTS: dict[str, Any] = {"gradient_as_bucket_view": True, "broadcast_buffers": None}


def ddp_settings(
    args: AccelTrainingArguments, handler: DistributedDataParallelKwargs | None = None
) -> DistributedDataParallelKwargs:
    """Returns the settings of `DistributedDataParallel`, from the training arguments and a kwargs handler.

    Args:
        args: the training arguments, whose `ddp_*` settings are read. If `ddp_gradient_as_bucket_view` is None,
            gradients are views of the buckets, and if `ddp_broadcast_buffers` is None, buffers are broadcast if they
            are part of the model's state. Another setting that is None leaves torch's default.
        handler: the handler from `accelerator_args.kwargs_handlers`, or None. If a handler is given, it is returned
            unchanged, and the arguments must not contradict it.

    Raises:
        SettingError: FG723 if the handler and the arguments give one setting different values.
    """
    given = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
        "gradient_as_bucket_view": args.ddp_gradient_as_bucket_view,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if handler is None:
        return DistributedDataParallelKwargs(**{**_DEFAULTS, **chosen})
    for name, value in chosen.items():
        if getattr(handler, name) != value:
            raise SettingError(
                f"ddp_{name} is {value}, and {name} of accelerator_args.kwargs_handlers is {getattr(handler, name)}",
                code="FG723",
                hint="keep one of them",
            ).about(f"args.ddp_{name}")
    return handler
