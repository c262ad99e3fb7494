"""The result of a sweep: its trials, best first.

The input is the journal's history and what the runs have logged; the output is `TrialResult`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.sweeps.journal import History, Outcome, TrialHistory
from forgather.sweeps.progress import TrialProgress
from forgather.sweeps.spec import SweepSpec
from forgather.sweeps.stopping import best_value


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial with its result.

    Args:
        number: the number of the trial.
        values: its values as YAML text, by path.
        outcome: how it ended, "waiting", "running" or "not run".
        note: why it was not run, ended early, or failed; "" otherwise.
        value: the best value of the metric, or None without one.
        step: the last step, or None.
        run_dir: its newest run folder, or None.
    """

    number: int
    values: Mapping[str, str]
    outcome: str
    note: str
    value: float | None
    step: int | None
    run_dir: str | None

    def as_data(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"values": dict(self.values)}


def results_of(
    history: History, spec: SweepSpec, progress: Mapping[int, TrialProgress], running: frozenset[int] = frozenset()
) -> list[TrialResult]:
    """Returns the trials of a sweep: those with a result first, the best one at the top.

    Args:
        history: what the journal says.
        spec: what the sweep is to do.
        progress: what the trials have logged, by number.
        running: the numbers of the trials that are running.
    """
    found = []
    for number, trial in history.trials.items():
        logged = progress.get(number)
        found.append(
            TrialResult(
                number=number,
                values=trial.values,
                outcome=_outcome(trial, is_running=number in running),
                note=trial.skipped or trial.cause,
                value=None if logged is None else best_value(logged.curve, spec.goal),
                step=None if logged is None else logged.step,
                run_dir=None if logged is None else logged.run_dir,
            )
        )

    def rank(result: TrialResult) -> tuple[bool, float, int]:
        value = result.value
        is_bad = value is None or result.outcome == Outcome.FAILED
        return is_bad, 0.0 if value is None else value if spec.is_better(0, 1) else -value, result.number

    return sorted(found, key=rank)


def best_of(results: Sequence[TrialResult]) -> TrialResult | None:
    """Returns the best trial that was not a failure, or None if none has a result.

    Args:
        results: the trials, best first.
    """
    return next((one for one in results if one.value is not None and one.outcome != Outcome.FAILED), None)


def _outcome(trial: TrialHistory, *, is_running: bool) -> str:
    if trial.skipped is not None:
        return "not run"
    if is_running:
        return "running"
    return "waiting" if trial.outcome is None else str(trial.outcome)
