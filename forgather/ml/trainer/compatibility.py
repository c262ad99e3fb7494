"""The engine that `accelerate launch` or its config file asks for, beside that of the config.

Takes the arguments and the variables that Accelerate's launcher sets; gives nothing, or an error. Keeps true: the
config counts. Another engine stops the run, since everything about it would differ; what else the launcher sets is left
aside, and told where the run is started (`launch/process_request.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgather.errors import DistributedError
from forgather.ml.trainer import argument_checks as door
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.rule_conditions import SOMETHING
from forgather.rules import Rules

DDP, FSDP, DEEPSPEED, PIPELINE = "DistributedDataParallel", "FSDP2", "DeepSpeed", "a pipeline"

_ENGINES = {
    "USE_DEEPSPEED": (DEEPSPEED, "set deepspeed in trainer_args (trainers/accel_trainer.yaml)"),
    "USE_FSDP": (FSDP, "set fsdp: true in trainer_args (trainers/accel_trainer.yaml)"),
    "USE_MEGATRON_LM": ("Megatron-LM", "no trainer here uses it"),
    "USE_PARALLELISM_CONFIG": (
        "its parallelism config",
        "set data_parallel_size and tensor_parallel_size in trainer_args",
    ),
}


def engine_of(args: Any) -> str:
    """Returns the engine that the arguments choose."""
    if hasattr(args, "schedule_class"):
        return PIPELINE
    if getattr(args, "deepspeed", None):
        return DEEPSPEED
    fsdp = getattr(args, "fsdp", None)
    return FSDP if fsdp and str(fsdp).lower() != "no_shard" else DDP


def refuse_another_engine(args: Any, variables: Mapping[str, str]) -> None:
    """Raises where the launcher asks for another engine than the config.

    Raises:
        DistributedError: FG724.
    """
    engine = engine_of(args)
    for name, (asked, hint) in _ENGINES.items():
        if _is_on(variables.get(name)) and asked != engine:
            raise DistributedError(
                f"accelerate launch, or its config file, asks for {asked}, and the config trains with {engine}",
                code="FG724",
                hint=f"{hint}, or start it with 'fgcli train' or torchrun, which read no such file",
            )


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "on", "y", "t")


_CODES = ("FG770", "FG775")


def refuse_combination(rules: Rules, args: TrainingArguments, **given: Any) -> None:
    """Raises where arguments do not go with the trainer, or with what it is given.

    Args:
        rules: those about the trainer.
        args: the arguments.
        **given: what the trainer is given, by the names of its parameters.

    Raises:
        SettingError: FG770 or FG775.
    """
    facts = rules.complete({})
    facts |= {f"args.{name}": value for name, value in args.RULES.complete(args.to_dict()).items()}
    facts |= {f"{name}.calls": _called(value) for name, value in given.items()}
    facts |= {name: None if value is None else SOMETHING for name, value in given.items()}
    door.refuse(breach for breach in rules.broken(facts) if breach.code in _CODES)


def _called(value: Any) -> str:
    """Returns the constructor of an object as a config names it, in small letters; "" for none."""
    if value is None:
        return ""
    value = getattr(value, "func", value)
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}".lower()
