"""The table of strategies: which training arguments select each strategy, and the function that makes it.

A strategy is named only in this table and in its own module, so a new strategy needs a module, a row in the table and a
template. The module of a strategy is imported only if the training arguments select the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.fsdp_config import shards_weights

DDP, FSDP, DEEPSPEED = "DistributedDataParallel", "FSDP2", "DeepSpeed"


class StrategyEntry(NamedTuple):
    """One strategy in the table.

    Args:
        make: the function that makes the strategy, as "module:function" relative to `forgather.ml.strategy`. It is
            called with the environment, the training arguments and the keyword arguments of `make_strategy`.
        engine: the name of the engine in messages.
        is_asked_by: a function that returns whether training arguments select the strategy.
        launcher_variable: the environment variable that `accelerate launch` sets if its user selects this engine. "" if
            there is none.
        hint: a text that says how to select the strategy in the training arguments.
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
        DEEPSPEED,
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
"""The strategies in order of precedence: the first one that the training arguments select is used."""


def entry_of(args: Any) -> StrategyEntry:
    """Returns the table entry of the strategy that training arguments select."""
    return next(entry for entry in STRATEGIES if entry.is_asked_by(args))


def make_strategy(environment: DistributedEnvironment, args: Any, **accelerator: Any) -> Strategy:
    """Returns the strategy that training arguments select.

    Args:
        environment: the rank, the world size and the process group.
        args: the training arguments.
        **accelerator: the settings `scaling`, `sync_each_batch` and `ddp`; `ddp` is a function that returns the
            settings of DistributedDataParallel.

    Raises:
        DistributedError: an error code of the strategy, if the strategy refuses the sizes or settings.
    """
    # By name, so that DeepSpeed or torch's pipelining are imported only by the runs that use them.
    module, _, function = entry_of(args).make.partition(":")
    make = getattr(import_module(f"forgather.ml.strategy.{module}"), function)
    made: Strategy = make(environment, args, **accelerator)
    return made
