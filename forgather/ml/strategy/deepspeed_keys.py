"""The keys of DeepSpeed's config: those it has, by section, and those that this trainer does not use.

Takes a config under present names, gives the keys that DeepSpeed does not have. Keeps true: a key of the outermost
level, and of a section whose unknown keys DeepSpeed passes over in silence, is refused whatever it is; one that
DeepSpeed itself refuses is refused here only where it is known what was meant, since another release may have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forgather.aliases import suggest_inside
from forgather.errors import closest
from forgather.ml.strategy.deepspeed_settings import ZERO

KEYS = tuple(
    """activation_checkpointing aio bf16 checkpoint comms_logger communication_data_type compile csv_monitor data_types
    dataloader_drop_last disable_allgather disable_python_gc dump_state flops_profiler fp16 gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor log_level managed_gradient_accumulation
    memory_breakdown optimizer prescale_gradients scheduler steps_per_print tensorboard timers train_batch_size
    train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_optimization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer""".split()
)
"""Keys of the outermost level. DeepSpeed reads what it knows there and passes over the rest in silence."""

ELSEWHERE = {
    "autotuning": "give the values themselves",
    "amp": "set bf16: true in the training arguments",
    "curriculum_learning": "order the rows of the data set",
    "data_efficiency": "order the rows of the data set",
    "elasticity": "start another number of processes and resume; checkpoints fit any number",
    "expert_parallel": "leave it out",
    "hybrid_engine": "leave it out",
    "pipeline": "use trainers/pipeline_trainer.yaml",
    "quantize_training": "leave it out",
    "sequence_parallel_size": "leave it out",
    "sparse_attention": "choose attn_implementation in the model's config",
    "tensor_parallel": "set tensor_parallel_size in the training arguments, without deepspeed",
    "torch_autocast": "set bf16 or fp16 in the training arguments",
    "weight_quantization": "leave it out",
}
"""What DeepSpeed has and this trainer does not do, or does by itself; and what to do instead."""

_SILENT = {
    "activation_checkpointing": """partition_activations number_checkpoints contiguous_memory_optimization
        synchronize_checkpoint_boundary profile cpu_checkpointing""",
    "aio": """block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds""",
    "optimizer": "type params legacy_fusion",
}
_REFUSED_BY_DEEPSPEED = {
    ZERO: """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload cpu_offload_param
        cpu_offload_use_pin_memory stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients mics_shard_size
        mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module""",
    f"{ZERO}.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline pipeline_read pipeline_write
        fast_init ratio super_offload cpuadam_cores_perc""",
    f"{ZERO}.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states""",
}
SECTIONS = {
    "deepspeed": (*KEYS, *ELSEWHERE),
    **{path: tuple(words.split()) for path, words in {**_SILENT, **_REFUSED_BY_DEEPSPEED}.items()},
}
"""The keys of each section; those of the outermost level as `deepspeed`."""
_SURELY = 0.85
_COMMENTS = ("_", "#", "comment")


class UnknownKey(NamedTuple):
    """A key that DeepSpeed does not have: where it stands, the section in words, and what to write."""

    keys: tuple[str, ...]
    section: str
    hint: str | None


def unknown_keys(config: Mapping[str, Any]) -> Iterator[UnknownKey]:
    """Yields the keys that are no settings of DeepSpeed, those of its sections included."""
    for path, known in SECTIONS.items():
        keys = () if path == "deepspeed" else tuple(path.split("."))
        section: Any = config
        for key in keys:
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping):
            yield from _unknown(keys, section, known)


def _unknown(keys: tuple[str, ...], section: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[UnknownKey]:
    owner = keys[-1] if keys else "deepspeed"
    silent = not keys or owner in _SILENT
    for name in map(str, section):
        if name in known or name.startswith(_COMMENTS):
            continue
        meant = suggest_inside(owner, name, ())
        if meant is None and not keys and _is_of_zero(name):
            meant = f"write it inside {ZERO}"
        if silent or meant or closest(name, known, cutoff=_SURELY):
            yield UnknownKey((*keys, name), owner, meant or suggest_inside(owner, name, known))


def _is_of_zero(key: str) -> bool:
    return (
        key in SECTIONS[ZERO] or key.startswith(("offload_", "cpu_offload", "stage3_")) or key.endswith("_bucket_size")
    )
