"""The types of the options of Lightning's callbacks and strategies.

The input is the name of a class and options; the output is what was expected of each option that has another type. The
options that become settings of ours are not listed: the rules about these settings apply to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forgather.lightning.durations import seconds_of
from forgather.rule_conditions import misfit
from forgather.value_text import can_be_path

_FLAG, _NUMBER = {"type": "flag"}, {"type": "number"}
_COUNT = {"type": "whole", "minimum": 0, "maximum": 2**63 - 1}
_TEXT, _PATH, _DURATION = {"type": "text"}, "path", "duration"
_LONGEST_SECONDS = 10**9
_Rule = Mapping[str, Any] | str

_RULES: Mapping[str, Mapping[str, _Rule]] = {
    "ModelCheckpoint": {
        "dirpath": _PATH,
        "filename": _TEXT,
        "monitor": _TEXT,
        "verbose": _FLAG,
        "save_last": {"type": ["flag", "word"], "choices": ["link"], "expected": 'true, false or "link"'},
        "save_on_exception": _FLAG,
        "save_weights_only": _FLAG,
        "auto_insert_metric_name": _FLAG,
        "every_n_train_steps": _COUNT,
        "every_n_epochs": _COUNT,
        "save_on_train_epoch_end": _FLAG,
        "enable_version_counter": _FLAG,
    },
    "EarlyStopping": {
        "monitor": _TEXT,
        "min_delta": _NUMBER,
        "patience": _COUNT,
        "verbose": _FLAG,
        "strict": _FLAG,
        "check_finite": _FLAG,
        "stopping_threshold": _NUMBER,
        "divergence_threshold": _NUMBER,
        "check_on_train_epoch_end": _FLAG,
        "log_rank_zero_only": _FLAG,
    },
    "LearningRateMonitor": {"log_momentum": _FLAG, "log_weight_decay": _FLAG},
    "Timer": {"verbose": _FLAG},
    "DDPStrategy": {"process_group_backend": _TEXT, "timeout": _DURATION},
    "FSDPStrategy": {"process_group_backend": _TEXT, "timeout": _DURATION},
    "DeepSpeedStrategy": {
        "process_group_backend": _TEXT,
        "timeout": _DURATION,
        "config": "path or mapping",
        **dict.fromkeys(
            (
                "zero_optimization",
                "offload_optimizer",
                "offload_parameters",
                "partition_activations",
                "cpu_checkpointing",
                "contiguous_memory_optimization",
                "synchronize_checkpoint_boundary",
            ),
            _FLAG,
        ),
        **dict.fromkeys(("offload_optimizer_device", "offload_params_device", "nvme_path"), _TEXT),
    },
}


def wrong_options(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the options with a value of a wrong type, with a description of what was expected.

    Args:
        name: the name of a class of Lightning, as "EarlyStopping".
        options: the options by name. None means "not given".

    Example:
        >>> list(wrong_options("EarlyStopping", {"monitor": "loss", "patience": "3"}))
        [('patience', 'a whole number from 0')]
    """
    for option, rule in _RULES.get(name, {}).items():
        value = options.get(option)
        if value is not None and (expected := _misfit(value, rule)) is not None:
            yield option, expected


def _misfit(value: Any, rule: _Rule) -> str | None:
    if isinstance(rule, Mapping):
        return misfit(value, {**rule, "expected": "a whole number from 0"} if rule is _COUNT else rule)
    if rule == _DURATION:
        seconds = value if type(value) in (int, float) else seconds_of(value)
        is_right = seconds is not None and 0 < seconds <= _LONGEST_SECONDS
        return None if is_right else f"a timedelta, or a number of seconds up to {_LONGEST_SECONDS}"
    if can_be_path(value) or (rule != _PATH and isinstance(value, Mapping)):
        return None
    return f"a {rule}"
