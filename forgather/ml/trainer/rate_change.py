"""A new learning rate at a resume: the schedule goes on from its position, and its rates are those of the new base.

Takes a restored schedule and the base rates of the config; changes the base rates of the optimizer's parameter groups
and of the schedule. A schedule whose rates are a product of the base rate and a factor keeps its form in this way;
under any other schedule the change is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

from forgather.errors import CheckpointError
from forgather.interventions import Intervention, record
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.run_control import Action

_log = get_logger(__name__)

LEARNING_RATE = "learning_rate"
"""The word of `allow_changed` that lets a resumed run take the learning rate of its config."""

_PRODUCTS = (
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)


def change_rates(schedule: Any, configured: Sequence[float], *, step: int, run_dir: str, factor: float = 1.0) -> None:
    """Gives the parameter groups the base rates of the config, after a checkpoint has been restored.

    The rate of the next step is the one that the schedule would have had with these base rates from the beginning. The
    change is logged, and recorded in the run folder if there is one. Nothing is done if no rate has changed.
    Collective: every process must call it.

    Args:
        schedule: the restored learning rate schedule.
        configured: the base rate of each parameter group in the config.
        step: the number of optimizer steps at the checkpoint.
        run_dir: the run folder.
        factor: the factor of the schedule that a user set while the run went on.

    Raises:
        CheckpointError: FG617 if the rates of the schedule are not a product of the base rate and a factor.
    """
    groups = schedule.optimizer.param_groups
    before = [float(group.get("initial_lr", group["lr"])) for group in groups]
    # One of the two may be new, if the checkpoint lacked it.
    is_same = list(configured) == before == list(getattr(schedule, "base_lrs", before))
    # A stage of a pipeline may have none of the groups that change.
    every = collectives.all_gather((is_same, before, list(configured)))
    if all(same for same, *_ in every):
        return
    kind = type(schedule)
    has_zero = not all(rate for _, old, _ in every for rate in old)
    if not (is_product := _is_product(schedule)) or has_zero or (factor != 1.0 and kind is not LambdaLR):
        reason = (
            f"{kind.__name__} has rates that are not the base rate times a factor"
            if not is_product
            else ("a base rate was 0" if has_zero else "fgcli control has set another rate in that run")
        )
        raise CheckpointError(
            f"learning_rate cannot be changed at step {step}: {reason}",
            code="FG617",
            hint="resume without allow_changed: [learning_rate], and set the rate while the run goes on (fgcli control "
            "set learning_rate=...)",
        )
    for group, old, new in zip(groups, before, configured, strict=True):
        group["initial_lr"] = new
        rate = float(group["lr"]) / old * new
        if isinstance(group["lr"], Tensor):  # a compiled or capturable optimizer keeps reading this tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    if hasattr(schedule, "base_lrs"):
        schedule.base_lrs = list(configured)
    schedule._last_lr = [float(group["lr"]) for group in groups]
    # As exactly as a run that had these rates from the beginning, whose product is not rounded twice.
    if kind is LambdaLR:
        for group, base, rate_at in zip(groups, configured, schedule.lr_lambdas, strict=True):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = base * rate_at(schedule.last_epoch)
    pairs = dict.fromkeys(pair for _, old, new in every for pair in zip(old, new, strict=True))
    shown = ", ".join(f"{new:g} (was {old:g})" for old, new in pairs)
    _log.warning(
        "learning_rate is %s from step %d on, by allow_changed; the schedule goes on from its step", shown, step
    )
    collectives.run_on_main(lambda: _record(run_dir, step, before[0], configured[0]))


def _is_product(schedule: Any) -> bool:
    """Returns whether each rate of a schedule is the base rate times a factor, which the base rate does not change."""
    kind = type(schedule)
    if kind is CosineAnnealingLR:
        return not schedule.eta_min
    return kind in _PRODUCTS and not (kind is ReduceLROnPlateau and any(schedule.min_lrs))


def _record(run_dir: str, step: int, before: float, value: float) -> None:
    if not os.path.isdir(run_dir):
        return
    now = round(time.time(), 3)
    change = Intervention(
        step=step, action=Action.SET, name=LEARNING_RATE, value=value, before=before, factor=value / before, when=now
    )
    try:
        record(run_dir, [change])
    except OSError as error:
        _log.warning("the new learning rate cannot be recorded in %s: %s", run_dir, error.strerror or error)
