"""What `accelerate launch` and its config file ask for, beside what the config says.

Takes the arguments and the variables that Accelerate's launcher sets; gives nothing, one line for each difference, or
an error. Keeps true: the config counts. Another engine stops the run, since everything about it would differ; a
setting of the launcher is said and left aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forgather.errors import DistributedError
from forgather.ml.log import get_logger

_log = get_logger(__name__)

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


def compare(args: Any, variables: Mapping[str, str]) -> None:
    """Says what the launcher asks for and the config does not.

    Raises:
        DistributedError: FG724 for another engine.
    """
    engine = engine_of(args)
    for name, (asked, hint) in _ENGINES.items():
        if _is_on(variables.get(name)) and asked != engine:
            raise DistributedError(
                f"accelerate launch, or its config file, asks for {asked}, and the config trains with {engine}",
                code="FG724",
                hint=f"{hint}, or start it with 'fgcli train' or torchrun, which read no such file",
            )
    for asked, instead in _left_aside(args, variables):
        _log.warning(
            "accelerate launch, or its config file, asks for %s; the config counts, and does not: %s", asked, instead
        )


def _left_aside(args: Any, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    precision = variables.get("MIXED_PRECISION", "no").lower()
    chosen = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if precision != chosen and "MIXED_PRECISION" in variables and precision != "no":
        yield f"mixed precision {precision}", f"set {precision}: true"
    backend = variables.get("DYNAMO_BACKEND", "no").lower()
    if backend != "no" and not args.torch_compile:
        yield f"compilation with {backend}", f"set torch_compile_backend: {backend}"
    steps = variables.get("GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto", str(args.gradient_accumulation_steps)):
        yield f"{steps} micro-batches an update", f"set gradient_accumulation_steps: {steps}"
    file = variables.get("DEEPSPEED_CONFIG_FILE", "none")
    if file not in ("none", str(getattr(args, "deepspeed", None))):
        yield f"the DeepSpeed file {file}", f"set deepspeed: {file}"
    if _is_on(variables.get("USE_CPU")) and not args.use_cpu and torch.accelerator.is_available():
        yield "the CPU", "set use_cpu: true"


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "on", "y", "t")
