"""The strategies: one table of the arguments that ask for each, its name in messages, and the function that makes it.

A strategy is named here and in its own module only, so a new one needs a module, a row here and a template. The module
of a strategy is imported only when the arguments ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.fsdp_config import shards_weights

DDP, FSDP = "DistributedDataParallel", "FSDP2"


class StrategyEntry(NamedTuple):
    """One strategy.

    Args:
        make: "module:function" under `forgather.ml.strategy`; called with the environment, the arguments and the
            keyword arguments of `make_strategy`.
        engine: name of the engine in messages.
        is_asked_by: returns whether arguments ask for it.
        launcher_variable: set by `accelerate launch` if it asks for this engine; "" for none.
        hint: how the training arguments ask for it.
    """

    make: str
    engine: str
    is_asked_by: Callable[[Any], bool]
    launcher_variable: str = ""
    hint: str = ""


STRATEGIES = (
    StrategyEntry("pipeline.strategy:pipeline_strategy", "a pipeline", lambda args: hasattr(args, "schedule_class")),
    StrategyEntry("single:single_strategy", DDP, lambda args: not hasattr(args, "tensor_parallel_size")),
    # Before FSDP2: DeepSpeed's engine shards by itself, so `fsdp` settings never reach it.
    StrategyEntry(
        "deepspeed:deepspeed_strategy",
        "DeepSpeed",
        lambda args: args.deepspeed is not None,
        "USE_DEEPSPEED",
        "set deepspeed in trainer_args (trainers/accel_trainer.yaml)",
    ),
    StrategyEntry(
        "fsdp2:fsdp2_strategy",
        FSDP,
        lambda args: shards_weights(args.fsdp, args.fsdp_config),
        "USE_FSDP",
        "set fsdp: true in trainer_args (trainers/accel_trainer.yaml)",
    ),
    # Slices without shards: the same strategy, with replicated weights along the data-parallel axis.
    StrategyEntry("fsdp2:fsdp2_strategy", DDP, lambda args: args.tensor_parallel_size > 1),
    # What remains, also for a single process, where DDP wraps nothing.
    StrategyEntry("data_parallel:data_parallel_strategy", DDP, lambda args: True),
)
"""The strategies in order of precedence: the first one that the arguments ask for is used."""


def entry_of(args: Any) -> StrategyEntry:
    """Returns the entry of the strategy that training arguments ask for."""
    return next(entry for entry in STRATEGIES if entry.is_asked_by(args))


def make_strategy(environment: DistributedEnvironment, args: Any, **accelerator: Any) -> Strategy:
    """Returns the strategy that training arguments ask for.

    Args:
        environment: rank of this process, and the process group.
        args: the training arguments.
        **accelerator: `scaling`, `sync_each_batch` and `ddp`, a function that returns the settings of DDP.

    Raises:
        DistributedError: for sizes or settings that this strategy refuses.
    """
    # By name, so that DeepSpeed or torch's pipelining are imported only by the runs that use them.
    module, _, function = entry_of(args).make.partition(":")
    make = getattr(import_module(f"forgather.ml.strategy.{module}"), function)
    made: Strategy = make(environment, args, **accelerator)
    return made
