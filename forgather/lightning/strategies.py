"""Lightning's strategy objects, with Lightning's argument names and defaults.

Each class is plain data. What its options mean is decided in `forgather.lightning.strategy_words`, which reads the
options that differ from Lightning's defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgather.value_text import are_equal


@dataclass(frozen=True, kw_only=True)
class DDPStrategy:
    """Replicated weights, one copy on each process.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: objects of Lightning; each
            is refused with what to write instead.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: the hook that exchanges gradients; refused.
        model_averaging_period: refused.
        process_group_backend: the backend of the process group, "gloo" or "nccl".
        timeout: the timeout of the process group, a `timedelta`.
        start_method: "popen"; the others are refused, because torchrun starts the processes.
        find_unused_parameters: whether DDP searches at every step for weights without a gradient.
        gradient_as_bucket_view: whether gradients are views of DDP's buckets, which saves memory.
        static_graph: whether every step has the autograd graph of the first step.
        bucket_cap_mb: the size of the gradient buckets in MiB.
        broadcast_buffers: whether the buffers of rank 0 are broadcast before each forward pass.
    """

    accelerator: Any = None
    parallel_devices: Any = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision_plugin: Any = None
    ddp_comm_state: Any = None
    ddp_comm_hook: Any = None
    ddp_comm_wrapper: Any = None
    model_averaging_period: int | None = None
    process_group_backend: str | None = None
    timeout: Any = None
    start_method: str = "popen"
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    bucket_cap_mb: int | None = None
    broadcast_buffers: bool = True


@dataclass(frozen=True, kw_only=True)
class FSDPStrategy:
    """Sharded weights; our trainers shard with FSDP2.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: objects of Lightning; each
            is refused with what to write instead.
        process_group_backend: the backend of the process group, "gloo" or "nccl".
        timeout: the timeout of the process group, a `timedelta`.
        cpu_offload: whether weights stay in host memory between their uses.
        mixed_precision: the types of weights and gradients, as torch's `MixedPrecision`.
        auto_wrap_policy: what is sharded as one unit: a set of layer classes, or a policy of torch that names them.
        activation_checkpointing: a layer class, or a list of them, whose activations are recomputed.
        activation_checkpointing_policy: a set of layer classes whose activations are recomputed.
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD" or "NO_SHARD".
        state_dict_type: "full" or "sharded"; our checkpoints are sharded and can be read by any number of processes.
        device_mesh: the numbers of replicas and of shards, for "HYBRID_SHARD".
        backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, sync_module_states: as in torch's
            FSDP.
    """

    accelerator: Any = None
    parallel_devices: Any = None
    cluster_environment: Any = None
    checkpoint_io: Any = None
    precision_plugin: Any = None
    process_group_backend: str | None = None
    timeout: Any = None
    cpu_offload: Any = None
    mixed_precision: Any = None
    auto_wrap_policy: Any = None
    activation_checkpointing: Any = None
    activation_checkpointing_policy: Any = None
    sharding_strategy: Any = "FULL_SHARD"
    state_dict_type: str = "full"
    device_mesh: Any = None
    backward_prefetch: Any = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    sync_module_states: bool = False


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStrategy:
    """ZeRO of DeepSpeed.

    Args:
        accelerator, parallel_devices, cluster_environment, precision_plugin: objects of Lightning; each is refused with
            what to write instead.
        zero_optimization, stage, contiguous_gradients, overlap_comm, allgather_partitions, reduce_scatter,
            allgather_bucket_size, reduce_bucket_size, sub_group_size: keys of DeepSpeed's `zero_optimization`.
        remote_device: "cpu" or "nvme", the device of ZeRO-3's weights while the model is built; without effect here.
        offload_optimizer, offload_parameters: whether the optimizer state, and the weights, are kept in host memory.
        offload_params_device, params_buffer_count, params_buffer_size, max_in_cpu, offload_optimizer_device,
            optimizer_buffer_count, nvme_path, pin_memory: further keys of the two.
        block_size, queue_depth, single_submit, overlap_events, thread_count: keys of DeepSpeed's `aio`.
        zero_allow_untested_optimizer: whether ZeRO takes any optimizer.
        logging_batch_size_per_gpu: "auto", or the rows of one micro-batch.
        config: a DeepSpeed config, as the path of a file or a mapping; takes the place of the other options.
        logging_level: the level of DeepSpeed's log.
        loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale: keys of DeepSpeed's `fp16`.
        partition_activations, cpu_checkpointing, contiguous_memory_optimization, synchronize_checkpoint_boundary: keys
            of DeepSpeed's `activation_checkpointing`.
        load_full_weights: whether `ckpt_path` is a single file of whole weights.
        process_group_backend: the backend of the process group, "gloo" or "nccl".
        timeout: the timeout of the process group, a `timedelta`.
        exclude_frozen_parameters: whether checkpoints leave out frozen weights.
    """

    accelerator: Any = None
    zero_optimization: bool = True
    stage: int = 2
    remote_device: str | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_params_device: str = "cpu"
    nvme_path: str = "/local_nvme"
    params_buffer_count: int = 5
    params_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    offload_optimizer_device: str = "cpu"
    optimizer_buffer_count: int = 4
    block_size: int = 1048576
    queue_depth: int = 8
    single_submit: bool = False
    overlap_events: bool = True
    thread_count: int = 1
    pin_memory: bool = False
    sub_group_size: int = 1_000_000_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool = True
    allgather_partitions: bool = True
    reduce_scatter: bool = True
    allgather_bucket_size: int = 200_000_000
    reduce_bucket_size: int = 200_000_000
    zero_allow_untested_optimizer: bool = True
    logging_batch_size_per_gpu: str | int = "auto"
    config: str | Mapping[str, Any] | None = None
    logging_level: int = 30
    parallel_devices: Any = None
    cluster_environment: Any = None
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: int = 1
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    synchronize_checkpoint_boundary: bool = False
    load_full_weights: bool = False
    precision_plugin: Any = None
    process_group_backend: str | None = None
    timeout: Any = None
    exclude_frozen_parameters: bool = False


STRATEGIES: Mapping[str, type[Any]] = {one.__name__: one for one in (DDPStrategy, FSDPStrategy, DeepSpeedStrategy)}
"""The strategy classes by name."""


def changed_options(options: Any) -> dict[str, Any]:
    """Returns the options of a dataclass object that differ from their defaults.

    Example:
        >>> changed_options(DDPStrategy(static_graph=True, timeout=None))
        {'static_graph': True}
    """
    values = {field.name: (getattr(options, field.name), field.default) for field in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if not _equal(value, default)}


def _equal(value: Any, default: Any) -> bool:
    # `is` first: a policy or a tensor need not compare to a bool.
    return type(value) is type(default) and are_equal(value, default)
