"""Training arguments of the multi-process trainers, and the translation of Accelerate's settings.

Each class takes keyword arguments and is a frozen dataclass whose values do not contradict one another. Building an
instance starts no process group. The rules about forbidden combinations are stored in `forgather/ml/rules/`, where
`fgcli check` reads them too. Settings in `accelerator_args` are translated to the equivalent training arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs

from forgather.aliases import suggest
from forgather.ml.log import get_logger
from forgather.ml.strategy.fsdp_objects import without_objects
from forgather.ml.trainer import argument_checks
from forgather.ml.trainer.accelerate_words import with_accelerate_words
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.deepspeed_words import with_deepspeed_settings, without_deepspeed
from forgather.rules import Rules


@dataclass(kw_only=True, frozen=True, init=False)
class ParallelArguments(TrainingArguments):
    """The settings that all trainers for several processes have in common.

    Args:
        data_parallel_size: the number of data-parallel ranks. None uses all processes that remain after the division by
            the other parallel sizes.
        tensor_parallel_size: the number of ranks over which each layer is sliced.
        context_parallel_size: the number of ranks over which the positions of each row are divided, for long rows.
            These ranks read the same rows.
        context_parallel_method: how attention sees the positions of other ranks. "ulysses" exchanges heads for
            positions around each attention function; "ring" sends keys and values around the ranks, by torch's ring
            attention, for causal attention over whole rows.
        context_parallel_rotate_method: how a ring passes keys and values on. "allgather" gathers those of all ranks at
            once; "alltoall" gets those of one rank at a time, with less memory.
        tp_plan: the tensor-parallel plan, which says which layers are sliced and how: "auto" for the model's own plan,
            or a mapping from module names to styles.
        fsdp: true, or how weights are sharded over data-parallel ranks: "full_shard", "shard_grad_op", "hybrid_shard",
            or "no_shard" for replicated weights.
        fsdp_config: the settings of FSDP2: `sharding_strategy` or `reshard_after_forward` (true, false, or the number
            of ranks in a group that keeps the weights after the forward pass); `auto_wrap_policy`,
            `transformer_layer_cls_to_wrap`, `min_num_params`, `wrap_embeddings`; `cpu_offload`; `mixed_precision`
            ("bf16", "autocast", or a mapping with `param_dtype`, `reduce_dtype`, `buffer_dtype`);
            `activation_checkpointing`; `shard_size` of hybrid sharding; `backward_prefetch`, `forward_prefetch`,
            `limit_all_gathers`.
        fp16: whether forward passes run under float16 autocast, with a scaled loss.
        ddp_find_unused_parameters: whether `DistributedDataParallel` searches at every step for weights without a
            gradient.
        ddp_bucket_cap_mb: the size of the gradient buckets of `DistributedDataParallel`, in MiB.
        ddp_broadcast_buffers: whether `DistributedDataParallel` broadcasts the buffers of rank 0 before each forward
            pass. None to do so if the model has buffers that checkpoints save, such as the means of batch norms.
        ddp_static_graph: whether `DistributedDataParallel` may assume that every step has the autograd graph of the
            first step.
        ddp_gradient_as_bucket_view: whether gradients are views of the buckets of `DistributedDataParallel`, which then
            take no further memory. None is true, unless `accelerator_args` has a handler for DDP.

    The allowed values, and the rules between settings, are stored in `forgather/ml/rules/parallel.json`.
    """

    RULES: ClassVar[Rules] = argument_checks.rules(
        "parallel", "forgather.ml.trainer.parallel_arguments:ParallelArguments"
    )

    data_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    context_parallel_method: str = "ulysses"
    context_parallel_rotate_method: str = "allgather"
    tp_plan: str | Mapping[str, Any] | None = None
    fsdp: bool | str | None = None
    fsdp_config: Mapping[str, Any] | None = None
    fp16: bool = False
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    ddp_gradient_as_bucket_view: bool | None = None

    def _as_data(self, given: dict[str, Any]) -> dict[str, Any]:
        config = given.get("fsdp_config")
        # A script gives torch's objects, whose words the rules, checkpoints and records know.
        return {**given, "fsdp_config": without_objects(config)} if isinstance(config, Mapping) else given


@dataclass(kw_only=True, frozen=True, init=False)
class AccelTrainingArguments(ParallelArguments):
    """The settings of `AccelTrainer`.

    Args:
        accelerator_args: the arguments of `accelerate.Accelerator`, with the settings of its data-loader configuration
            and of the process group. A setting that has an equivalent training argument is translated to it.
        deepspeed: the DeepSpeed configuration, as the path of a file or a mapping; or "auto". Values that only the
            configuration has, such as its optimizer and its schedule, are those of the run.
        strict: whether DeepSpeed must be installed if `deepspeed` asks for it. If false, FSDP2 takes its place.
        accelerate_config: the path of a file that `accelerate config` wrote, whose words are translated.

    The allowed values, and the rules between settings, are stored in `forgather/ml/rules/accel_trainer.json`.
    """

    RULES: ClassVar[Rules] = argument_checks.rules("accel_trainer", "forgather.ml:AccelTrainingArguments")

    accelerator_args: Mapping[str, Any] | None = None
    deepspeed: str | Mapping[str, Any] | None = None
    strict: bool = True
    accelerate_config: str | None = None

    deepspeed_replaced: ClassVar[Any] = None
    """The value of `deepspeed` that FSDP2 replaces, because DeepSpeed is not installed; otherwise None."""

    @property
    def deepspeed_config(self) -> Any:
        """The DeepSpeed config that the run has to follow, whether DeepSpeed or FSDP2 trains."""
        return self.deepspeed if self.deepspeed is not None else self.deepspeed_replaced

    def _with_nested_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        given = with_accelerate_words(given, self.RULES.defaults)
        given = with_accelerator_settings(given, self.RULES.defaults)
        asked = with_deepspeed_settings(given)
        found = without_deepspeed(asked)
        if found.get("deepspeed") != asked.get("deepspeed"):
            object.__setattr__(self, "deepspeed_replaced", asked["deepspeed"])
        # The values of plugins and files were not looked at before.
        argument_checks.raise_first_error(self.RULES.values(found))
        return found

    def replace(self, **settings: Any) -> Self:
        """Returns a copy in which some settings have new values, and defaults are derived from the new values."""
        if self.deepspeed_replaced is not None:
            settings = {"deepspeed": self.deepspeed_replaced, **settings}
        return super().replace(**settings)


@dataclass(kw_only=True, frozen=True, init=False)
class PipelineTrainingArguments(ParallelArguments):
    """The settings of `PipelineTrainer`.

    Args:
        split_spec: the points at which the model is split: a mapping from names of modules or blocks to "end" or
            "beginning"; "auto" for stages of similar cost, or of similar time within the memory if `fgcli train` knows
            the devices; or a number of stages.
        schedule_class: the name of a schedule class of torch.distributed.pipelining.
        pipeline_chunks: the number of micro-batches into which `per_device_train_batch_size` rows are split; by default
            the number of stages, if the number of rows allows it. In a config, `auto` is the number with the shortest
            planned step, which `fgcli train` finds.
        stages_per_rank: the number of stages on one rank; by default the number that the schedule needs.
        pipeline_parallel_size: the number of ranks over which the stages of one model replica are distributed. None
            uses all processes that remain after the division by the other parallel sizes.
        checkpoint_sequential: whether to recompute the activations of each stage in the backward pass.
        overlap_grad_reduce: whether replicas sum the gradients of a stage as soon as its last backward pass of a step
            has ended, while other stages still compute; otherwise they sum all gradients after the backward passes.

    The allowed values, and the rules between settings, are stored in `forgather/ml/rules/pipeline_trainer.json`.
    """

    RULES: ClassVar[Rules] = argument_checks.rules("pipeline_trainer", "forgather.ml:PipelineTrainingArguments")

    split_spec: Mapping[str, str] | str | int | None = None
    schedule_class: str = "ScheduleGPipe"
    pipeline_chunks: int | None = None
    stages_per_rank: int | None = None
    pipeline_parallel_size: int | None = None
    checkpoint_sequential: bool = False
    overlap_grad_reduce: bool = True


# Each class again: a signature that is set on the base class would be inherited and lack the fields of the subclass.
for _arguments in (ParallelArguments, AccelTrainingArguments, PipelineTrainingArguments):
    _arguments.__signature__ = argument_checks.signature_of(_arguments)  # type: ignore[attr-defined]


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
"""The settings of Accelerate that have an equivalent training argument, with the name of this argument."""

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
"""The settings of Accelerate, by name and value, that have no effect on a run, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSettings:
    """The settings in `accelerator_args` that the strategy and the process group use.

    Args:
        backend: the backend of the process group; None uses the backend of the distributed environment.
        timeout_seconds: the timeout of the process group; None uses the timeout of the distributed environment.
        ddp: the settings of `DistributedDataParallel`; None uses the `ddp_*` training arguments.
        scaling: the settings of the float16 gradient scaler.
        sync_each_batch: whether gradients are all-reduced after every micro-batch.
    """

    backend: str | None = None
    timeout_seconds: float | None = None
    ddp: DistributedDataParallelKwargs | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)
    sync_each_batch: bool = False


def with_accelerator_settings(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the training arguments, extended by the equivalents of the settings in `accelerator_args`.

    Args:
        given: the training arguments as the user wrote them.
        defaults: the defaults of all training arguments. An argument that has its default value is treated as not
            given, because templates write defaults.
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
            if settings.get(target) in (None, defaults.get(target)):
                settings[target] = moved
                _log.warning("accelerator_args.%s was taken as %s: %s", name, target, _shown(moved))
    return settings


def _equivalent_settings(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the training arguments, as (name, value) pairs, that are equivalent to a setting of Accelerate.

    Yields nothing for a setting that only requests Accelerate's default behaviour.
    """
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
    """Returns the settings in `accelerator_args` that the strategy and the process group use.

    Raises:
        SettingError: FG723 if there is a kwargs handler that is not supported.
    """
    given = given or {}
    # By class, as Accelerate does: it allows one handler of each class.
    handlers = {type(handler): handler for handler in given.get("kwargs_handlers") or ()}
    group, ddp, scaling = (handlers.pop(kind, None) for kind in _HANDLERS)
    for kind in handlers:
        raise SettingError(
            f"accelerator_args.kwargs_handlers has a {kind.__name__}, which is not supported here",
            code="FG723",
            hint=suggest("setting", kind.__name__, [known.__name__ for known in _HANDLERS]),
        ).about("accelerator_args")
    if getattr(group, "init_method", None) is not None:
        raise SettingError(
            f"init_method of InitProcessGroupKwargs is {group.init_method!r}",
            code="FG723",
            hint="leave it out: processes find one another by the variables of their launcher",
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
