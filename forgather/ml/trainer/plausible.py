"""Whether the counts and rates of a checkpoint can be those of a run.

Takes the parts of a checkpoint; gives nothing, or an error that names the part and the value. Keeps true: what a run
can have written passes, also one that began with the state of an earlier run; numbers that no run reaches, and those
that are none, are known before anything of the run changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.files import DATA, METER, OPTIMIZER, PROGRESS, SCHEDULE
from forgather.ml.checkpoint.lineage import Origin
from forgather.ml.trainer.parts import numbers, used

_MOST_ROWS = 10**9  # of one update
# No setting of an optimizer and no rate is larger; a count of 2**53 is not, either.
_MOST = 1e15
_UNSIGNED = frozenset(
    """lr initial_lr max_lr min_lr base_lr eps weight_decay momentum max_momentum base_momentum alpha lr_decay lambd t0
    clip_threshold learning_rate grad_norm""".split()
)
_FRACTIONS = frozenset(("betas", "rho"))
# Of the schedules of torch and transformers. What one of the user's keeps (a metric, a slope) may have any sign.
_UNSIGNED_OF_SCHEDULES = _UNSIGNED | frozenset(
    """last_epoch _step_count _last_lr base_lrs max_lrs min_lrs end_lr start_lr eta_min default_min_lr base_momentums
    max_momentums start_momentum end_momentum T_0 T_cur T_i T_max T_mult _milestones milestones gamma factor power
    total_iters total_size total_steps step_ratio step_size end_step patience num_bad_epochs cooldown
    cooldown_counter""".split()
)
_COUNTS = ("steps", "losses", "skipped", "total_steps", "total_losses", "total_skipped")
_UNCARRIED = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size")
_COUNTED_BY_CALLBACKS = ("_begins", "early_stopping_patience_counter")


def refuse_impossible(
    folder: Path,
    step: int,
    origin: Origin,
    progress: TrainerState | None,
    optimizer: Any,
    parts: Mapping[str, Any],
    *,
    groups: Sequence[Mapping[str, Any]] = (),
    schedule: Mapping[str, Any] | None = None,
) -> None:
    """Raises where a part says what no run can have written.

    Args:
        folder: of the checkpoint.
        step: as its manifest says.
        origin: of its run.
        progress: for people; None where there is none.
        optimizer: as `Saved.optimizer`.
        parts: of the training state.
        groups: parameter groups of the present optimizer: what is infinite or negative there may be so here, too.
        schedule: the state of the present schedule, for the same.

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
            _optimizer(optimizer, _Present([dict(group) for group in groups]))
    if SCHEDULE in parts:
        with used(SCHEDULE, folder):
            _schedule(parts[SCHEDULE], _Present(schedule))
    if DATA in parts:
        with used(DATA, folder):
            _position(step, parts[DATA])
    if METER in parts:
        with used(METER, folder):
            _meter(parts[METER])
    # Earlier releases kept neither.
    with used("guard", folder):
        norms = parts.get("guard", {}).get("norms", [])
        for place, norm in numbers({str(place): norm for place, norm in enumerate(norms)}).items():
            _check(norm < 0, f"norms.{place}", norm)
    with used("skips", folder):
        for facts in parts.get("skips", ()):
            numbers({name: facts[name] for name in ("step", "epoch", "first", "end")}, whole=True)
            _check(facts["end"] < facts["first"], "end", facts["end"])


class _Present:
    """What is infinite, large or negative in the run that goes on, by name: there it is no mistake."""

    def __init__(self, tree: Any) -> None:
        self.large: set[str] = set()
        self.negative: set[str] = set()
        for place, number in _numbers(tree, ""):
            if not abs(number) < _MOST:
                self.large.add(_name_of(place))
            if number < 0:
                self.negative.add(_name_of(place))

    def judge(self, place: str, number: float, *, is_unsigned: bool) -> None:
        """Raises where a number is none that a run has."""
        name = _name_of(place)
        _check(math.isnan(number), place, number)
        _check(not abs(number) < _MOST and name not in self.large, place, number)
        _check(number < 0 and is_unsigned and name not in self.negative, place, number)


def _name_of(place: str) -> str:
    return next((part for part in reversed(place.split(".")) if not part.isdigit()), place)


def _check(is_impossible: bool, name: str, value: Any) -> None:
    if is_impossible:
        raise ValueError(f"{name} is {value!s:.40}")


def _progress(step: int, progress: TrainerState) -> None:
    # An epoch has one update at least.
    _check(not 0 <= progress.epoch <= step + 1, "epoch", progress.epoch)
    best = progress.best_global_step
    numbers({"num_input_tokens_seen": progress.num_input_tokens_seen, "best_global_step": best or 0}, whole=True)
    _check((best or 0) > step, "best_global_step", best)
    uncarried = {name: getattr(progress, name) or 0 for name in _UNCARRIED}
    for name, value in numbers({"total_flos": progress.total_flos, **uncarried}).items():
        _check(value < 0 or (name != "total_flos" and value >= 2**53), name, value)
    for number, line in enumerate(progress.log_history):
        numbers({f"log_history.{number}.step": line.get("step", 0)}, whole=True)
        _check(line.get("step", 0) > step, f"log_history.{number}.step", line.get("step"))
        _check(not 0 <= line.get("epoch", 0) <= step + 1, f"log_history.{number}.epoch", line.get("epoch"))
    _best(progress, best)
    _check(not isinstance(progress.stateful_callbacks, Mapping), "stateful_callbacks", progress.stateful_callbacks)
    for place, count in _numbers(progress.stateful_callbacks, ""):
        for name in _COUNTED_BY_CALLBACKS:
            _check(f".{name}" in place and not 0 <= count < 2**53, place, count)
        _check("._times." in place and not 0 <= count < _MOST, place, count)


def _best(progress: TrainerState, best: int | None) -> None:
    metric = progress.best_metric
    if metric is None:
        return
    _check(type(metric) not in (int, float) or math.isnan(metric), "best_metric", metric)
    lines = [line for line in progress.log_history if best is not None and line.get("step") == best]
    measured = [value for line in lines for name, value in line.items() if name.startswith("eval_")]
    # It is what an evaluation gave; the log may lack the line, where it was written without.
    is_known = any(isinstance(value, int | float) and _is_near(value, metric) for value in measured)
    _check(not is_known and (bool(measured) or not abs(metric) < _MOST), "best_metric", metric)


def _is_near(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)


def _optimizer(tree: Mapping[str, Any], present: _Present) -> None:
    for group in tree["param_groups"]:
        for place, number in _numbers({name: value for name, value in group.items() if name != "params"}, ""):
            present.judge(place, number, is_unsigned=_name_of(place) in _UNSIGNED)
            _check(_name_of(place) in _FRACTIONS and not 0 <= number <= 1, place, number)
        rate = group.get("lr", 0.0)
        _check(isinstance(rate, bool) or not isinstance(rate, int | float | Tensor), "lr", rate)
    for name, state in tree["state"].items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            is_step = key == "step" and isinstance(value, int | float | Tensor)
            _check(is_step and not 0 <= float(value) < 2**53, f"step of {name}", value)
            for place, number in _numbers(value, key):
                _check(not math.isfinite(number), f"{place} of {name}", number)


def _schedule(tree: Any, present: _Present) -> None:
    for place, number in _numbers(tree, ""):
        present.judge(place, number, is_unsigned=_name_of(place) in _UNSIGNED_OF_SCHEDULES)


def _meter(state: Any) -> None:
    numbers(state)
    numbers({name: state[name] for name in _COUNTS if name in state}, whole=True)
    for name, value in state.items():
        _check(name in _UNSIGNED and not 0 <= value < _MOST, name, value)
    for prefix in ("", "total_"):
        steps = state.get(f"{prefix}steps", 0)
        for name in ("losses", "skipped"):
            _check(state.get(prefix + name, 0) > steps, prefix + name, state.get(prefix + name))


def _position(step: int, position: Mapping[str, Any]) -> None:
    counts = {
        name: position[name]
        for name in ("epoch", "row", "batch", "batch_rows", "update_rows", "workers")
        if name in position
    }
    numbers(counts, whole=True)
    for place, number in _numbers(position, ""):
        _check(not 0 <= number < (2**64 if place == "seed" else 2**53), place, number)
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
