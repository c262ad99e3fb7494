"""What a sweep would run, said before anything is run.

The input is judged trials; the output is a `SweepPlan`: how many run, which cannot and why, which are duplicates, and
the values in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.errors import ProjectError
from forgather.sweeps.journal import History
from forgather.sweeps.spec import Method, SweepSpec
from forgather.sweeps.trials import Trial


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The trials of a sweep before it starts.

    Args:
        spec: what the sweep is to do.
        trials: the judged trials; empty for a method that chooses values by results.
        num_done: the number of trials that have ended already, which are not among them.
    """

    spec: SweepSpec
    trials: tuple[Trial, ...]
    num_done: int = 0

    @property
    def num_runs(self) -> int:
        """The number of trials that are run."""
        if self.spec.method is Method.OPTUNA:
            return max(0, (self.spec.num_trials or 0) - self.num_done)
        return sum(trial.runs for trial in self.trials)

    @property
    def refused(self) -> list[Trial]:
        """The trials whose config has an error."""
        return [trial for trial in self.trials if trial.refusal is not None]

    @property
    def duplicates(self) -> list[Trial]:
        """The trials that build what an earlier one builds."""
        return [trial for trial in self.trials if trial.same_as is not None]

    def as_data(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        return {
            "method": str(self.spec.method),
            "metric": self.spec.metric,
            "goal": str(self.spec.goal),
            "num_runs": self.num_runs,
            "num_done": self.num_done,
            "trials": [
                {
                    "number": trial.number,
                    "values": dict(trial.values),
                    "error": None if trial.refusal is None else refusal_text(trial),
                    "same_as": trial.same_as,
                }
                for trial in self.trials
            ],
        }


def plan_of(spec: SweepSpec, trials: Iterable[Trial]) -> SweepPlan:
    """Returns the plan of a sweep.

    Args:
        spec: what the sweep is to do.
        trials: the judged trials.

    Raises:
        ProjectError: FG568 if none of them can run.
    """
    plan = SweepPlan(spec=spec, trials=tuple(trials))
    if plan.num_runs == 0:
        first = plan.refused[0]
        raise ProjectError(
            f"none of the {len(plan.trials)} trials can run; the first one: {refusal_text(first)}",
            code="FG568",
            span=first.refusal.span if first.refusal else None,
            hint="correct the config or the values: fgcli sweep --dry-run lists what is wrong with each",
        )
    return plan


def plan_of_rest(spec: SweepSpec, trials: Iterable[Trial], history: History) -> SweepPlan:
    """Returns the plan of a sweep that goes on: the trials that have not ended, and those that are new.

    Args:
        spec: what the sweep is to do.
        trials: the judged trials.
        history: what the journal of the sweep says.
    """
    known = history.trials.values()
    done = {one.number for one in known if one.is_done}
    left = tuple(trial for trial in trials if trial.number not in done)
    return SweepPlan(spec=spec, trials=left, num_done=sum(one.is_done and one.skipped is None for one in known))


def refusal_text(trial: Trial) -> str:
    """Returns why a trial is not run, in one line; "" if it is run."""
    if trial.same_as is not None:
        return f"builds the same as trial {trial.same_as}"
    if trial.refusal is None:
        return ""
    where = "" if trial.refusal.span is None else f" ({trial.refusal.span.file}:{trial.refusal.span.line})"
    return f"[{trial.refusal.code}] {trial.refusal.message}{where}"


def seconds_left(done: Sequence[float], remaining: int, slots: int) -> float | None:
    """Returns how long a sweep will take, by the trials that have ended; None before the first one.

    Args:
        done: the seconds of each trial that has ended.
        remaining: the number of trials that have not.
        slots: the number of trials that run at once.

    Units:
        seconds.
    """
    return None if not done else sum(done) / len(done) * remaining / slots
