"""Whether the counts and rates of a checkpoint can be those of a run.

Takes the parts of a checkpoint; gives nothing, or an error that names the part and the value. Keeps true: what a run
can have written passes, also one that began with the state of an earlier run; numbers that no run reaches, and those
that are none, are known before anything of the run changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.files import DATA, OPTIMIZER, PROGRESS, SCHEDULE
from forgather.ml.checkpoint.lineage import Origin
from forgather.ml.trainer.parts import numbers, used

_MOST_ROWS = 10**9  # of one update


def refuse_impossible(
    folder: Path, step: int, origin: Origin, progress: TrainerState | None, optimizer: Any, parts: Mapping[str, Any]
) -> None:
    """Raises where a part says what no run can have written.

    Args:
        folder: of the checkpoint.
        step: as its manifest says.
        origin: of its run.
        progress: for people; None where there is none.
        optimizer: as `Saved.optimizer`.
        parts: of the training state.

    Raises:
        CheckpointError: FG675.
    """
    with used("step", folder):
        _check(0 < origin.max_steps < step, "step", f"{step} of {origin.max_steps}")
    if progress is not None:
        with used(PROGRESS, folder):
            _progress(step, progress)
    if isinstance(optimizer, Mapping):
        with used(OPTIMIZER, folder):
            _optimizer(optimizer)
    if SCHEDULE in parts:
        with used(SCHEDULE, folder):
            for place, number in _numbers(parts[SCHEDULE], ""):
                _check(math.isnan(number), place, number)
    if DATA in parts:
        with used(DATA, folder):
            _position(step, parts[DATA])


def _check(is_impossible: bool, name: str, value: Any) -> None:
    if is_impossible:
        raise ValueError(f"{name} is {value!s:.40}")


def _progress(step: int, progress: TrainerState) -> None:
    # An epoch has one update at least.
    _check(not 0 <= progress.epoch <= step + 1, "epoch", progress.epoch)
    best = progress.best_global_step
    numbers({"num_input_tokens_seen": progress.num_input_tokens_seen, "best_global_step": best or 0}, whole=True)
    _check((best or 0) > step, "best_global_step", best)
    metric = progress.best_metric
    _check(not (metric is None or type(metric) in (int, float)), "best_metric", metric)
    _check(not isinstance(progress.stateful_callbacks, Mapping), "stateful_callbacks", progress.stateful_callbacks)


def _optimizer(tree: Mapping[str, Any]) -> None:
    for group in tree["param_groups"]:
        for place, number in _numbers({name: value for name, value in group.items() if name != "params"}, ""):
            _check(math.isnan(number), place, number)
        rate = float(group["lr"]) if "lr" in group else 0.0
        _check(not 0 <= rate < math.inf, "lr", rate)
        _check(type(group.get("lr")) in (bool, str), "lr", group.get("lr"))
    for name, state in tree["state"].items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if key == "step" and isinstance(value, int | float | Tensor):
                _check(not 0 <= float(value) < 2**53, f"step of {name}", float(value))


def _position(step: int, position: Mapping[str, Any]) -> None:
    counts = {
        name: position[name] for name in ("epoch", "row", "batch", "batch_rows", "update_rows") if name in position
    }
    numbers(counts, whole=True)
    _check(counts["epoch"] > step, "epoch", counts["epoch"])
    rows = position.get("num_rows")
    _check(rows is not None and (type(rows) is not int or rows < counts.get("row", 0)), "row", f"{counts} of {rows!r}")
    for name in ("row", "batch"):
        _check(counts.get(name, 0) > step * _MOST_ROWS, name, counts.get(name))


def _numbers(tree: Any, place: str) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a tree, each with where it is."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _numbers(value, f"{place}.{name}" if place else str(name))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _numbers(value, f"{place}.{number}")
    elif isinstance(tree, Tensor) and not tree.ndim and not tree.is_complex():
        yield place, float(tree)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield place, float(tree)
