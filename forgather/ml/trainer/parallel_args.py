"""Settings of a run in several processes, beside those of `TrainingArguments`.

Takes keywords; gives a frozen record whose values fit together, with one another and with the number of processes.
Keeps true: building one starts no process group; what may not be combined is data, which `fgcli check` reads too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from forgather.ml.trainer import arguments_check as door
from forgather.ml.trainer.accelerator_args import settled
from forgather.ml.trainer.args import TrainingArguments, signature_of
from forgather.rules import Rules


@dataclass(kw_only=True, frozen=True, init=False)
class ParallelArguments(TrainingArguments):
    """What every trainer of several processes takes.

    Args:
        data_parallel_size: replicas that see different rows; None for what the other sizes leave.
        tensor_parallel_size: ranks that hold slices of one layer.
        tp_plan: which layers are sliced, and how: "auto" for the model's own plan, or a mapping of module names.
        fsdp: true, or how the weights are shared among replicas: "full_shard", "shard_grad_op", "hybrid_shard", or
            "no_shard" for whole copies.
        fsdp_config: `sharding_strategy` or `reshard_after_forward`; `auto_wrap_policy`,
            `transformer_layer_cls_to_wrap`, `min_num_params`; `cpu_offload`; `mixed_precision`, "bf16", "autocast", or
            `param_dtype`, `reduce_dtype`, `buffer_dtype`; `activation_checkpointing`; `shard_size` of a hybrid;
            `backward_prefetch`, `forward_prefetch`, `limit_all_gathers`.
        fp16: forward passes under float16 autocast, with a scaled loss.
        ddp_find_unused_parameters: DistributedDataParallel looks for weights without gradient at every step.
        ddp_bucket_cap_mb: size of the pieces in which it adds gradients.
        ddp_broadcast_buffers: it copies buffers of the first rank before each forward pass.
        ddp_static_graph: it may take the graph of the first step for all steps.

    Their values and what must hold among them are data: `forgather/ml/rules/parallel.json`.
    """

    RULES: ClassVar[Rules] = door.rules("parallel", "forgather.ml.trainer.parallel_args:ParallelArguments")

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
        accelerator_args: what `accelerate.Accelerator` takes, and what belongs to its data-loader configuration, to the
            process group or to our data loader.
        deepspeed: the file or the mapping of DeepSpeed's configuration, or "auto".

    Their values and what must hold among them are data: `forgather/ml/rules/accel_trainer.json`.
    """

    RULES: ClassVar[Rules] = door.rules("accel_trainer", "forgather.ml:AccelTrainingArguments")

    accelerator_args: Mapping[str, Any] | None = None
    deepspeed: str | Mapping[str, Any] | None = None

    def _settled(self, given: dict[str, Any]) -> dict[str, Any]:
        return settled(given, self.RULES.defaults)


@dataclass(kw_only=True, frozen=True, init=False)
class PipelineTrainingArguments(ParallelArguments):
    """Settings of `PipelineTrainer`.

    Args:
        split_spec: where the model is cut: names of modules or blocks to "end" or "beginning"; "auto" for stages of
            like cost; or a number of stages.
        schedule_class: a schedule of torch.distributed.pipelining.
        pipeline_chunks: micro-batches that `per_device_train_batch_size` rows are split into; as many as there are
            stages by default, where the rows allow it.
        stages_per_rank: stages that one rank holds; what the schedule asks for by default.
        pipeline_parallel_size: ranks that hold the stages of one replica; what the other sizes leave by default.
        checkpoint_sequential: recompute the activations of each stage in the backward pass.

    Their values and what must hold among them are data: `forgather/ml/rules/pipeline_trainer.json`.
    """

    RULES: ClassVar[Rules] = door.rules("pipeline_trainer", "forgather.ml:PipelineTrainingArguments")

    split_spec: Mapping[str, str] | str | int | None = None
    schedule_class: str = "ScheduleGPipe"
    pipeline_chunks: int | None = None
    stages_per_rank: int | None = None
    pipeline_parallel_size: int | None = None
    checkpoint_sequential: bool = False


for _arguments in (ParallelArguments, AccelTrainingArguments, PipelineTrainingArguments):
    _arguments.__signature__ = signature_of(_arguments)  # type: ignore[attr-defined]
