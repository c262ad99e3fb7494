"""What `accelerate launch` adds to a run: settings from its options, or from a config file that lies on the machine.

Takes environment variables; gives the settings that differ from doing nothing. Keeps true: nothing is read but names
that Accelerate gives, and a setting that changes nothing is not told.
"""

from __future__ import annotations

from collections.abc import Mapping

from forgather.launcher_env import is_accelerate

_IDLE = ("", "no", "none", "false", "0", "default", "null")
# Groups of variables that count only where the first one switches them on.
_GROUPS = {
    "FSDP_": "ACCELERATE_USE_FSDP",
    "ACCELERATE_DEEPSPEED_": "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_DYNAMO_": "ACCELERATE_DYNAMO_BACKEND",
    "MEGATRON_LM_": "ACCELERATE_USE_MEGATRON_LM",
    "PARALLELISM_CONFIG_": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
_UNTOLD = ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")


def added_settings(environ: Mapping[str, str]) -> list[str]:
    """Returns the settings that `accelerate launch` made, as NAME=VALUE."""
    if not is_accelerate(environ):
        return []
    found = []
    for name in sorted(environ):
        switch = next((switch for group, switch in _GROUPS.items() if name.startswith(group)), None)
        if switch is None and not name.startswith("ACCELERATE_"):
            continue
        is_on = _counts(environ.get(switch, "")) if switch else True
        if is_on and _counts(environ[name]) and name not in _UNTOLD:
            found.append(f"{name}={environ[name]}")
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    return found if steps in ("", "1") else [*found, f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}"]


def _counts(value: str) -> bool:
    return value.strip().lower() not in _IDLE
