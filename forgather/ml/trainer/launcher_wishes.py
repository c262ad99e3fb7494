"""The engine that `accelerate launch` or its config file asks for, beside that of the config.

Takes the arguments and the variables that Accelerate's launcher sets; gives nothing, or an error. Keeps true: the
config counts. Another engine stops the run, since everything about it would differ; what else the launcher sets is left
aside, and told where the run is started (`launch/process_request.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgather.errors import DistributedError

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
