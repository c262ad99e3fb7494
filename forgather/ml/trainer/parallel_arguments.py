"""Training arguments of the multi-process trainers, and the translation of Accelerate's settings.

Takes keyword arguments; gives a frozen record whose values are consistent with one another and with the number of
processes. Building one starts no process group. Forbidden combinations are data (`forgather/ml/rules/`), which `fgcli
check` reads too. Settings of `accelerator_args` are moved to the arguments that mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs

from forgather.errors import nearest
from forgather.ml.log import get_logger
from forgather.ml.trainer import argument_checks
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.arguments import TrainingArguments, signature_of
from forgather.rules import Rules


@dataclass(kw_only=True, frozen=True, init=False)
class ParallelArguments(TrainingArguments):
    """Settings of every trainer for several processes.

    Args:
        data_parallel_size: data-parallel ranks; None uses the ranks that the other sizes leave.
        tensor_parallel_size: ranks that hold slices of one layer.
        tp_plan: which layers are sliced, and how: "auto" for the model's own plan, or a mapping of module names.
        fsdp: true, or how weights are sharded over data-parallel ranks: "full_shard", "shard_grad_op", "hybrid_shard",
            or "no_shard" for replicated weights.
        fsdp_config: `sharding_strategy` or `reshard_after_forward`; `auto_wrap_policy`,
            `transformer_layer_cls_to_wrap`, `min_num_params`; `cpu_offload`; `mixed_precision`, "bf16", "autocast", or
            `param_dtype`, `reduce_dtype`, `buffer_dtype`; `activation_checkpointing`; `shard_size` of hybrid sharding;
            `backward_prefetch`, `forward_prefetch`, `limit_all_gathers`.
        fp16: forward passes run under float16 autocast, with a scaled loss.
        ddp_find_unused_parameters: `DistributedDataParallel` searches at every step for weights without a gradient.
        ddp_bucket_cap_mb: size of its gradient buckets, in MiB.
        ddp_broadcast_buffers: it broadcasts the buffers of rank 0 before each forward pass.
        ddp_static_graph: it may assume that every step has the autograd graph of the first one.

    Allowed values and the rules between settings are data: `forgather/ml/rules/parallel.json`.
    """

    RULES: ClassVar[Rules] = argument_checks.rules(
        "parallel", "forgather.ml.trainer.parallel_arguments:ParallelArguments"
    )

    data_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    tp_plan: str | Mapping[str, Any] | None = None
    fsdp: bool | str | None = None
    fsdp_config: Mapping[str, Any] | None = None
    fp16: bool = False
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None


@dataclass(kw_only=True, frozen=True, init=False)
class AccelTrainingArguments(ParallelArguments):
    """Settings of `AccelTrainer`.

    Args:
        accelerator_args: arguments of `accelerate.Accelerator`, of its data-loader configuration, of the process group,
            or of our data loader.
        deepspeed: a file or a mapping with DeepSpeed's configuration, or "auto".

    Allowed values and the rules between settings are data: `forgather/ml/rules/accel_trainer.json`.
    """

    RULES: ClassVar[Rules] = argument_checks.rules("accel_trainer", "forgather.ml:AccelTrainingArguments")

    accelerator_args: Mapping[str, Any] | None = None
    deepspeed: str | Mapping[str, Any] | None = None

    def _with_nested_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        return with_accelerator_settings(given, self.RULES.defaults)


@dataclass(kw_only=True, frozen=True, init=False)
class PipelineTrainingArguments(ParallelArguments):
    """Settings of `PipelineTrainer`.

    Args:
        split_spec: where the model is split: names of modules or blocks to "end" or "beginning"; "auto" for stages of
            similar cost; or a number of stages.
        schedule_class: a schedule class of torch.distributed.pipelining.
        pipeline_chunks: micro-batches that `per_device_train_batch_size` rows are split into; by default the number of
            stages, if the rows allow it.
        stages_per_rank: stages that one rank holds; by default the number that the schedule needs.
        pipeline_parallel_size: ranks that hold the stages of one model replica; None uses the ranks that the other
            sizes leave.
        checkpoint_sequential: recompute the activations of each stage in the backward pass.

    Allowed values and the rules between settings are data: `forgather/ml/rules/pipeline_trainer.json`.
    """

    RULES: ClassVar[Rules] = argument_checks.rules("pipeline_trainer", "forgather.ml:PipelineTrainingArguments")

    split_spec: Mapping[str, str] | str | int | None = None
    schedule_class: str = "ScheduleGPipe"
    pipeline_chunks: int | None = None
    stages_per_rank: int | None = None
    pipeline_parallel_size: int | None = None
    checkpoint_sequential: bool = False


# Each class again: a signature that is set on the base class would be inherited and lack the fields of the subclass.
for _arguments in (ParallelArguments, AccelTrainingArguments, PipelineTrainingArguments):
    _arguments.__signature__ = signature_of(_arguments)  # type: ignore[attr-defined]


_log = get_logger(__name__)

MOVES = {
    "cpu": "use_cpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_accumulation_plugin.num_steps": "gradient_accumulation_steps",
    "dataloader_config.num_workers": "dataloader_num_workers",
    "dataloader_config.pin_memory": "dataloader_pin_memory",
    "dataloader_config.persistent_workers": "dataloader_persistent_workers",
    "dataloader_config.prefetch_factor": "dataloader_prefetch_factor",
    "dataloader_config.data_seed": "data_seed",
    "dynamo_backend": "torch_compile_backend",
    "log_with": "report_to",
}
"""Settings of Accelerate that have another name in the training arguments."""

_EVEN = "each row is computed once, and padding at the end is not counted; no row is repeated or dropped"
_DISPATCH = "every process reads its own rows of the batch that dispatching would split"
_SCHEDULE = "the schedule advances once per optimizer step, whatever the accumulation"
REMARKS: dict[tuple[str, Any], str] = {
    ("dispatch_batches", True): _DISPATCH,
    ("dataloader_config.dispatch_batches", True): _DISPATCH,
    ("even_batches", True): _EVEN,
    ("even_batches", False): _EVEN,
    ("dataloader_config.even_batches", True): _EVEN,
    ("dataloader_config.even_batches", False): _EVEN,
    ("gradient_accumulation_plugin.adjust_scheduler", True): _SCHEDULE,
    ("gradient_accumulation_plugin.adjust_scheduler", False): _SCHEDULE,
    ("dataloader_config.use_seedable_sampler", False): "the order of the rows depends only on the seed",
    ("dataloader_config.use_stateful_dataloader", True): "a checkpoint always holds the position in the data",
    ("dataloader_config.non_blocking", False): "copies from pinned memory do not wait",
}
"""Settings of Accelerate, by name and value, that need no argument, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSettings:
    """The part of `accelerator_args` that goes to the strategy and to the process group.

    Args:
        backend: of the process group; None uses that of the environment.
        timeout_seconds: of the process group; None uses that of the environment.
        ddp: settings of `DistributedDataParallel`; None uses those of the arguments.
        scaling: settings of the float16 gradient scaler.
        sync_each_batch: all-reduce gradients after every micro-batch.
    """

    backend: str | None = None
    timeout_seconds: float | None = None
    ddp: DistributedDataParallelKwargs | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)
    sync_each_batch: bool = False


def with_accelerator_settings(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings, extended by those that are written in `accelerator_args`.

    Args:
        given: settings as the user wrote them.
        defaults: of all settings. A setting that has its default value counts as not written, because templates write
            defaults.
    """
    settings = dict(given)
    for name, value in _flattened(given.get("accelerator_args") or {}):
        if (name, value) in REMARKS:
            _log.warning(
                "accelerator_args.%s %s has no effect of its own: %s", name, _shown(value), REMARKS[name, value]
            )
        # The arguments win: with both set, "fp16" of Accelerate next to `bf16: true` would ask for two precisions.
        if name == "mixed_precision" and (settings.get("bf16") or settings.get("fp16")):
            continue
        for target, moved in _equivalent_settings(name, value):
            # A default counts as not written, because templates write every default.
            if settings.get(target, defaults.get(target)) == defaults.get(target):
                settings[target] = moved
                _log.warning("accelerator_args.%s was taken as %s: %s", name, target, _shown(moved))
    return settings


def _equivalent_settings(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the (name, value) settings that a setting of Accelerate corresponds to; none for its default behaviour."""
    # In Accelerate None stands for "not given".
    if value is None:
        return
    if name == "mixed_precision":
        if value in ("bf16", "fp16"):
            yield value, True
    elif name == "cpu":
        # `cpu: false` in Accelerate does not request an accelerator.
        if value:
            yield "use_cpu", True
    elif name == "dynamo_backend":
        if str(value).lower() != "no":
            yield "torch_compile_backend", str(value).lower()
    elif name in MOVES:
        yield MOVES[name], value


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        # Handlers are objects in a list and are read by `accelerator_settings`; `log_with` is the only plain list.
        elif not isinstance(value, list | tuple) or name == "log_with":
            yield prefix + name, value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def accelerator_settings(given: Mapping[str, Any] | None) -> AcceleratorSettings:
    """Returns the settings of `accelerator_args` for the strategy and the process group.

    Raises:
        SettingError: FG723 for a kwargs handler that is not supported.
    """
    given = given or {}
    # By class, as Accelerate does: it allows one handler of each class.
    handlers = {type(handler): handler for handler in given.get("kwargs_handlers") or ()}
    group, ddp, scaling = (handlers.pop(kind, None) for kind in _HANDLERS)
    for kind in handlers:
        raise SettingError(
            f"accelerator_args.kwargs_handlers has a {kind.__name__}, which is not supported here",
            code="FG723",
            hint=nearest(kind.__name__, [known.__name__ for known in _HANDLERS]),
        ).about("accelerator_args")
    timeout = getattr(group, "timeout", None)
    return AcceleratorSettings(
        backend=given.get("backend") or getattr(group, "backend", None),
        timeout_seconds=None if timeout is None else timeout.total_seconds(),
        ddp=ddp,
        scaling=scaling.to_kwargs() if scaling is not None else {},
        sync_each_batch=bool((given.get("gradient_accumulation_plugin") or {}).get("sync_each_batch")),
    )


_HANDLERS = (InitProcessGroupKwargs, DistributedDataParallelKwargs, GradScalerKwargs)
