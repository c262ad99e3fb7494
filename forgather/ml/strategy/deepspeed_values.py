"""Values of a DeepSpeed config that DeepSpeed itself takes as they are, and would read as something else.

Takes a config; gives the values of a wrong type. DeepSpeed checks the sections about ZeRO, fp16 and bf16 itself, with
an error. Other values it only reads: the text "no" counts as true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forgather.rule_conditions import AUTO, misfit

_FLAG, _WHOLE, _NUMBER = {"type": "flag"}, {"type": "whole", "minimum": 1}, {"type": "number", "minimum": 0}
_SECTION = {"type": "mapping", "expected": "a mapping, as in DeepSpeed's examples"}
_WORDS: dict[str, dict[str, Any]] = {
    # DeepSpeed ignores the case of these two.
    "communication_data_type": {
        "type": "word",
        "choices": ["fp16", "bf16", "fp32", "FP16", "BF16", "FP32"],
        "expected": "one of: fp16, bf16, fp32",
    },
    "gradient_allreduce_op": {
        "type": "word",
        "choices": ["mean", "sum", "MEAN", "SUM"],
        "expected": "one of: mean, sum",
    },
    "log_level": {"type": "word", "choices": ["debug", "info", "warning", "error", "critical"]},
}
_OUTERMOST: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        """dataloader_drop_last disable_allgather disable_python_gc dump_state managed_gradient_accumulation
        memory_breakdown prescale_gradients wall_clock_breakdown zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer""".split(),
        _FLAG,
    ),
    **dict.fromkeys("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps".split(), _WHOLE),
    # Common configs write 1e5, or Accelerate's infinity, to print nothing.
    "steps_per_print": {"type": "number", "above": 0, "also": [math.inf]},
    "gradient_clipping": _NUMBER,
    "gradient_predivide_factor": {"type": "number", "above": 0},
    **dict.fromkeys(
        """activation_checkpointing aio bf16 checkpoint comms_logger compile csv_monitor data_types flops_profiler fp16
        optimizer scheduler tensorboard timers wandb zero_optimization""".split(),
        _SECTION,
    ),
    **_WORDS,
}
RULES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "": _OUTERMOST,
    "activation_checkpointing": {
        **dict.fromkeys(
            """partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile
            cpu_checkpointing""".split(),
            _FLAG,
        ),
        "number_checkpoints": _WHOLE,
    },
    "aio": {
        **dict.fromkeys("block_size queue_depth intra_op_parallelism thread_count".split(), _WHOLE),
        **dict.fromkeys("single_submit overlap_events use_gds".split(), _FLAG),
    },
    "optimizer": {"type": {"type": "text"}, "params": {"type": "mapping"}, "legacy_fusion": _FLAG},
    "zero_optimization": {"stage": {"type": "whole", "minimum": 0, "maximum": 3}},
}
"""The constraint of each key, by section; "" is the outermost level."""


class WrongValue(NamedTuple):
    """A value that DeepSpeed would misread.

    Args:
        keys: the names of the sections around the value, from the outside in, and then its key.
        value: the value.
        expected: a description of what is accepted.
    """

    keys: tuple[str, ...]
    value: Any
    expected: str


def wrong_values(config: Mapping[str, Any]) -> Iterator[WrongValue]:
    """Yields the values of a wrong type.

    Args:
        config: the config. None and "auto" are right everywhere.

    Example:
        >>> [found.expected for found in wrong_values({"prescale_gradients": "no"})]
        ['true or false']
    """
    for path, rules in RULES.items():
        section = config.get(path) if path else config
        if not isinstance(section, Mapping):
            continue
        for key, rule in rules.items():
            value = section.get(key)
            if value is None or value == AUTO:
                continue
            if (expected := misfit(value, rule)) is not None:
                yield WrongValue((path, key) if path else (key,), value, expected)
