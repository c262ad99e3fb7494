"""The state of a model that lies whole in this process, in the form that no layout of processes changes.

Takes a model and its optimizer; gives {"model": weights by name, "optimizer": {"state": {name: ...}, "param_groups":
[{"params": names, ...settings}]}}, and puts such a state back. Keeps true: a state of another model is refused; one
that an older checkpoint holds by position is read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgather.errors import CheckpointError
from forgather.ml.strategy.state import load_optimizer_state, whole_optimizer_state


def whole_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Returns "model" and "optimizer" (None where there is none)."""
    return {
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else whole_optimizer_state(model, optimizer),
    }


def restore_whole(model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
    """Puts a state back; without "optimizer" the optimizer stays as it is.

    Raises:
        CheckpointError: FG605 where the state is that of another model or optimizer.
    """
    try:
        model.load_state_dict(dict(state["model"]))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights do not fit {type(model).__name__}: {first_line(error)}",
            code="FG605",
            hint="resume with the model that the checkpoint was written with",
        ) from None
    kept = state.get("optimizer")
    if optimizer is None or kept is None:
        return
    try:
        if _by_position(kept):
            optimizer.load_state_dict(dict(kept))
        else:
            load_optimizer_state(model, optimizer, kept)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer state does not fit {type(optimizer).__name__}: {first_line(error)}",
            code="FG605",
            hint="resume with the optimizer and the trainable parameters that the checkpoint was written with",
        ) from None


def _by_position(kept: Mapping[str, Any]) -> bool:
    return all(isinstance(number, int) for group in kept["param_groups"] for number in group["params"])


def first_line(error: Exception) -> str:
    """The first thing that torch says, whole: its heading names only the model, which the message names already."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Error(s) in loading"):
        del lines[0]
    first = lines[0].rstrip(".") if lines else type(error).__name__
    # A list of missing weights may hold hundreds of names.
    first = first if len(first) <= 300 else first[:300].rsplit(" ", 1)[0] + " ..."
    return first + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")
