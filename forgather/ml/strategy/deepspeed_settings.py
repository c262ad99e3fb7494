"""The DeepSpeed config as a value: its keys, and the settings that it has in common with the training arguments.

The functions take a config in which deprecated keys have been renamed. They return the value and the line of a key, the
keys that DeepSpeed does not have, and the differences from the training arguments. The message about a difference names
both places. Unknown keys are refused at the outermost level and in the sections in which DeepSpeed silently ignores
them. In all other sections, where DeepSpeed itself refuses unknown keys, a key is refused only if the intended key can
be guessed, since another release of DeepSpeed may have the key.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from forgather.aliases import suggest_inside
from forgather.errors import Diagnostic, TrainingError, closest
from forgather.source import Span

AUTO = "auto"
ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """The DeepSpeed config of a run.

    Args:
        config: the config for the engine. Sizes that depend on the model may still be "auto".
        source: the file or setting that the config was read from, as messages name it.
        notes: one line for each setting that was converted or has no effect.
        text: the text of the JSON file that the config was read from. None if the config was given as a mapping.
    """

    config: dict[str, Any]
    source: str
    notes: tuple[str, ...] = ()
    text: str | None = None

    @property
    def stage(self) -> int:
        """The ZeRO stage: 1 shards the optimizer state, 2 also the gradients, and 3 also the weights."""
        return int(self.config[ZERO]["stage"])

    def line_of(self, *keys: str) -> Span | None:
        """Returns the line of a key in the JSON file, or None if the config was given as a mapping.

        Args:
            *keys: the names of the sections around the key, from the outside in, and then the key.
        """
        if self.text is None:
            return None
        # A search in the text, since Python's JSON reader does not give positions; keys are searched inside their
        # sections.
        start = 0
        for key in keys:
            found = self.text.find(f'"{key}"', start)
            start = found if found >= 0 else start
        return Span(self.source, self.text.count("\n", 0, start) + 1)

    def filled_for_model(self, hidden_size: int | None) -> ZeroConfig:
        """Returns the config with each value "auto" replaced or removed.

        Bucket sizes with this value are computed from the width of the model. All other keys with this value are
        removed, so that the defaults of DeepSpeed apply.

        Args:
            hidden_size: the width of the model. None if it is unknown; then bucket sizes with the value "auto" are
                removed too.

        Units:
            hidden_size: features.

        Source:
            The bucket sizes are those of transformers' `HfTrainerDeepSpeedConfig.trainer_config_finalize`.
        """
        config = copy.deepcopy(self.config)
        if hidden_size is not None:
            sizes = {
                "reduce_bucket_size": hidden_size * hidden_size,
                "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
                "stage3_param_persistence_threshold": 10 * hidden_size,
            }
            config[ZERO] |= {name: size for name, size in sizes.items() if config[ZERO].get(name) == AUTO}
        _drop_auto(config)
        return dataclasses.replace(self, config=config)


@dataclass(frozen=True)
class SharedSetting:
    """A setting that both the DeepSpeed config and the training arguments have.

    Args:
        keys: the keys of the setting in the DeepSpeed config, from the outermost section to the key itself.
        argument: the name, for messages, of the training argument or the object that determines the value.
        value: the value of that argument.
    """

    keys: tuple[str, ...]
    argument: str
    value: Any


def shared_settings(args: Any, processes: int) -> Iterator[SharedSetting]:
    """Yields the settings of the DeepSpeed config whose values the training arguments determine.

    Args:
        args: the training arguments.
        processes: the number of data-parallel ranks.
    """
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    yield SharedSetting(("train_micro_batch_size_per_gpu",), "per_device_train_batch_size", rows)
    yield SharedSetting(("gradient_accumulation_steps",), "gradient_accumulation_steps", steps)
    product = f"per_device_train_batch_size {rows} x gradient_accumulation_steps {steps} x {processes} processes"
    yield SharedSetting(("train_batch_size",), product, rows * steps * processes)
    yield SharedSetting(("gradient_clipping",), "max_grad_norm", float(args.max_grad_norm))
    yield SharedSetting(("bf16", "enabled"), "bf16", bool(args.bf16))
    yield SharedSetting(("fp16", "enabled"), "fp16", bool(getattr(args, "fp16", False)))
    yield SharedSetting(("managed_gradient_accumulation",), "the trainer's accumulation", True)


def optimizer_settings(kind: str, settings: Mapping[str, Any]) -> Iterator[SharedSetting]:
    """Yields the settings of the optimizer that the trainer made, as the DeepSpeed config would name them.

    Args:
        kind: the name of the optimizer class.
        settings: the defaults of the optimizer, such as `lr` and `betas`.
    """
    yield SharedSetting(("optimizer", "type"), "the optimizer", kind)
    for name in ("lr", "betas", "eps", "weight_decay", "momentum"):
        if name in settings:
            yield SharedSetting(("optimizer", "params", name), f"{name} of the optimizer", settings[name])


ABSENT = object()


def value_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Returns the value of a key in a config, or `ABSENT` if the config does not have the key.

    Args:
        config: the DeepSpeed config.
        keys: the names of the sections around the key, from the outside in, and then the key.
    """
    value: Any = config
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return value


def set_value(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    """Sets the value of a key, and creates the sections around the key if they do not exist.

    Args:
        config: the DeepSpeed config, which is changed in place. The sections around the key are copied first.
        keys: the names of the sections around the key, from the outside in, and then the key.
        value: the new value.
    """
    for key in keys[:-1]:
        held = config.get(key)
        config[key] = dict(held) if isinstance(held, Mapping) else {}
        config = config[key]
    config[keys[-1]] = value


def refuse_differences(found: ZeroConfig, settings: list[SharedSetting], where: str) -> None:
    """Raises an error if the DeepSpeed config differs from the given settings; the message names both places.

    Args:
        found: the DeepSpeed config.
        settings: the settings to compare. If the config has one of them, it must have the same value.
        where: the name, for messages, of the place that the settings come from, such as "the training arguments".

    Raises:
        TrainingError: FG742 if at least one setting differs. The error reports all differences.
    """
    differences = [
        (setting, written)
        for setting in settings
        if (written := value_of(found.config, setting.keys)) not in (ABSENT, AUTO) and not _same(written, setting.value)
    ]
    if not differences:
        return
    findings = []
    for setting, written in differences:
        name, span = ".".join(setting.keys), found.line_of(*setting.keys)
        source, value = "" if span else f" in {found.source}", _shown(setting.value)
        findings.append(
            Diagnostic(
                code="FG742",
                message=f"{name} is {_shown(written)}{source}, and {setting.argument} is {value} in {where}",
                span=span,
                hint=f'write "auto" for {name} or leave it out, or set both to {value}',
            )
        )
    first = findings[0]
    raise TrainingError(first.message, code="FG742", span=first.span, hint=first.hint, others=findings[1:])


def _same(written: Any, value: Any) -> bool:
    # Before numbers: True equals 1 in Python.
    if isinstance(written, bool) or isinstance(value, bool):
        return written is value
    if isinstance(written, str) and isinstance(value, str):
        return written.casefold() == value.casefold()
    if isinstance(written, list | tuple) and isinstance(value, list | tuple):
        return len(written) == len(value) and all(map(_same, written, value))
    if isinstance(written, int | float) and isinstance(value, int | float):
        return math.isclose(written, value, rel_tol=1e-9)
    return bool(written == value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


def _drop_auto(config: dict[str, Any]) -> None:
    """Removes the keys that are still "auto", so that DeepSpeed's defaults apply."""
    for key in list(config):
        if isinstance(config[key], dict) and key != "data_types":
            _drop_auto(config[key])
        elif config[key] == AUTO:
            del config[key]


KEYS = tuple(
    """activation_checkpointing aio bf16 checkpoint comms_logger communication_data_type compile csv_monitor data_types
    dataloader_drop_last disable_allgather disable_python_gc dump_state flops_profiler fp16 gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor log_level managed_gradient_accumulation
    memory_breakdown optimizer prescale_gradients scheduler steps_per_print tensorboard timers train_batch_size
    train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_optimization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer""".split()
)
"""The keys at the outermost level of the config. DeepSpeed silently ignores any other key at this level."""

ELSEWHERE = {
    "autotuning": "give the values themselves",
    "amp": "set bf16: true in the training arguments",
    "curriculum_learning": "order the rows of the data set",
    "data_efficiency": "order the rows of the data set",
    "datastates_ckpt": "set async_save in the training arguments",
    "elasticity": "start another number of processes and resume; checkpoints fit any number",
    "expert_parallel": "leave it out",
    "hybrid_engine": "leave it out",
    "pipeline": "use trainers/pipeline_trainer.yaml",
    "quantize_training": "leave it out",
    "sequence_parallel_size": "leave it out",
    "sparse_attention": "choose attn_implementation in the model's config",
    "tensor_parallel": "set tensor_parallel_size in the training arguments, without deepspeed",
    "torch_autocast": "set bf16 or fp16 in the training arguments",
    "use_data_before_expert_parallelism": "leave it out",
    "weight_quantization": "leave it out",
}
"""The DeepSpeed features that this trainer does not use or provides itself, each with what to do instead."""

# DeepSpeed silently ignores unknown keys in these sections, so they are refused here.
_SILENT = {
    "activation_checkpointing": """partition_activations number_checkpoints contiguous_memory_optimization
        synchronize_checkpoint_boundary profile cpu_checkpointing""",
    "aio": """block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds""",
    "optimizer": "type params legacy_fusion",
}
# An unknown key in these sections is left to DeepSpeed, unless the intended key can be guessed.
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
"""The keys of each section. The keys of the outermost level are under "deepspeed"."""
# A name that is at least this similar to a known key is treated as a misspelling of the key. Applies to the sections in
# which DeepSpeed itself refuses unknown keys.
_SURELY = 0.85
# JSON has no comments, so files use keys like these instead.
_COMMENTS = ("_", "#", "comment")


class UnknownKey(NamedTuple):
    """A key that DeepSpeed does not have.

    Args:
        keys: the names of the sections around the key, from the outside in, and then the key.
        section: the name of the innermost section around the key.
        hint: what to write instead. None if there is no suggestion.
    """

    keys: tuple[str, ...]
    section: str
    hint: str | None


def unknown_keys(config: Mapping[str, Any]) -> Iterator[UnknownKey]:
    """Yields the keys in a config and in its sections that DeepSpeed does not have."""
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
        # In other sections DeepSpeed reports the key itself, and another release may have it.
        if silent or meant or closest(name, known, cutoff=_SURELY):
            yield UnknownKey((*keys, name), owner, meant or suggest_inside(owner, name, known))


def _is_of_zero(key: str) -> bool:
    return (
        key in SECTIONS[ZERO] or key.startswith(("offload_", "cpu_offload", "stage3_")) or key.endswith("_bucket_size")
    )
