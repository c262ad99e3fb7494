"""What a strategy keeps in the memory of the host while the devices compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgather.ml.strategy.deepspeed import DeepSpeedZero
from forgather.ml.strategy.deepspeed_config import offloads


def offloaded_parts(strategy: Any) -> tuple[str, ...]:
    """Returns the rows of a plan that are memory of the host.

    Args:
        strategy: the strategy of the run.
    """
    if isinstance(strategy, DeepSpeedZero):
        state = ("gradients", "optimizer") if offloads(strategy.config.config, "optimizer") else ()
        weights = ("parameters",) if offloads(strategy.config.config, "param") else ()
        return (*weights, *state)
    sharding = getattr(strategy, "_sharding", None)
    return ("parameters", "gradients", "optimizer") if sharding is not None and sharding.cpu_offload else ()


def steps_on_the_host(strategy: Any) -> bool:
    """Returns whether the optimizer updates weights in the memory of the host, where it takes them one by one."""
    return "optimizer" in offloaded_parts(strategy)


def offload_notes(strategy: Any, device_type: str) -> Iterator[str]:
    """Yields a sentence that says which rows of a plan for GPUs are memory of the host, if any are.

    Args:
        strategy: the strategy of the run.
        device_type: the kind of device that is planned for, "cpu" or "cuda".
    """
    if device_type != "cpu" and (parts := offloaded_parts(strategy)):
        yield (
            f"the rows {', '.join(parts)} are offloaded to the memory of the host, and the sums count them with the "
            "device: a device needs less than planned"
        )
