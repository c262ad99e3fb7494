"""How an optimizer of torch takes weights in a trace: as it does on the device that is planned for."""

from __future__ import annotations

from typing import Any

from forgather.ml.planner.offload import Offload
from forgather.planner.memory_plan import OPTIMIZER


def choose_path(strategy: Any, device_type: str) -> None:
    """Makes an optimizer of torch compute as it does on a GPU: all weights at once, unless its settings differ.

    In the memory of the host it takes weights one by one.

    Args:
        strategy: the strategy of the run, with its optimizer.
        device_type: the kind of device that is planned for, "cpu" or "cuda".

    Source:
        `torch.optim.optimizer._default_to_fused_or_foreach`, which is false for tensors on a CPU and for fake ones.
    """
    if device_type == "cpu" or OPTIMIZER in Offload.of(strategy, device_type).parts:
        return
    for group in strategy.optimizer.param_groups:
        # Adafactor has no setting "differentiable", and takes weights one by one unless `foreach` is set.
        is_asked = group.get("differentiable") is False and not group.get("fused")
        if "foreach" in group and group["foreach"] is None and is_asked:
            group["foreach"] = True
