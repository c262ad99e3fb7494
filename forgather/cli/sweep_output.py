"""Sweeps as text: the plan before they run, a line for each trial that starts or ends, and the table of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from forgather.cli.output import Line, plural
from forgather.cli.palette import styled
from forgather.project.path_display import near_path
from forgather.sweeps.driver import Sweep
from forgather.sweeps.journal import Outcome
from forgather.sweeps.plan import SweepPlan, refusal_text, seconds_left
from forgather.sweeps.result import TrialResult, best_of, results_of
from forgather.sweeps.spec import Method, SweepSpec

_LISTED = 20


def plan_lines(plan: SweepPlan) -> list[Line]:
    """Returns the lines that say what a sweep would run.

    Args:
        plan: the plan.
    """
    spec = plan.spec
    if spec.method is Method.OPTUNA:
        head = f"{plural(plan.num_runs, 'trial')}, whose values Optuna proposes from the results"
    else:
        parts = [f"{plural(plan.num_runs, 'trial')} to run"]
        if plan.num_done:
            parts.append(f"{plan.num_done} done")
        if plan.refused:
            parts.append(f"{len(plan.refused)} with errors")
        if plan.duplicates:
            parts.append(plural(len(plan.duplicates), "duplicate"))
        head = ", ".join(parts)
    lines = [Line(f"{head}; compared by {spec.metric} ({spec.goal})", lambda line: styled("strong", line))]
    columns = _short_names([one.path for one in spec.parameters])
    shown = plan.trials if len(plan.trials) <= _LISTED else [*plan.trials[:_LISTED]]
    rows = [
        [str(trial.number), *(dict(trial.assignments)[path] for path in columns), refusal_text(trial)]
        for trial in shown
    ]
    lines += _table(["trial", *columns.values(), ""], rows, lambda row: "error" if row[-1].startswith("[") else "")
    if len(plan.trials) > len(shown):
        lines.append(Line(f"  and {len(plan.trials) - len(shown)} more; --json lists all"))
    unshown = [trial for trial in plan.refused if trial.number >= _LISTED]
    lines += [Line(f"  trial {one.number}: {refusal_text(one)}", lambda line: styled("error", line)) for one in unshown]
    return lines


def result_lines(results: Sequence[TrialResult], spec: SweepSpec, config: str | None, page: str | None) -> list[Line]:
    """Returns the table of the results, and what can be done next.

    Args:
        results: the trials, best first.
        spec: what the sweep was to do.
        config: the file with the best values as a config, or None.
        page: the page that compares the trials, or None.
    """
    columns = _short_names([one.path for one in spec.parameters])
    rows = [
        [
            str(one.number),
            *(one.values.get(path, "") for path in columns),
            "" if one.value is None else f"{one.value:.6g}",
            "" if one.step is None else f"{one.step:,}",
            one.outcome + (f": {one.note}" if one.note else ""),
        ]
        for one in results
    ]
    best = best_of(results)
    winner = None if best is None else str(best.number)
    lines = [Line("")]
    lines += _table(
        ["trial", *columns.values(), spec.metric, "step", ""],
        rows,
        lambda row: "good" if row[0] == winner else "error" if row[-1].startswith("failed") else "",
    )
    if best is None:
        names = sorted({one.outcome for one in results})
        return [*lines, Line(f"no trial has logged {spec.metric!r} ({', '.join(names)})")]
    values = ", ".join(f"{columns[path]} {text}" for path, text in best.values.items() if path in columns)
    lines += [Line(""), Line(f"best: trial {best.number} ({values}), {spec.metric} {best.value:.6g}")]
    places = (("config", config), ("run", best.run_dir and near_path(best.run_dir)), ("page", page))
    return lines + [Line(f"  {name:<8}{place}") for name, place in places if place]


class SweepReporter:
    """Says in a line when a trial starts or ends.

    Args:
        sweep: the sweep.
        say: a function that prints a line.
    """

    def __init__(self, sweep: Sweep, say: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._say = say
        self._begun: dict[tuple[int, int], float] = {}
        self._ends = {number: trial.ends for number, trial in sweep.journal.history.trials.items()}
        self._seconds: list[float] = []
        self._columns = _short_names([one.path for one in sweep.spec.parameters])

    def report(self) -> None:
        """Prints what has changed since the last call."""
        for number, trial in self._sweep.journal.history.trials.items():
            attempt = (number, trial.attempts)
            if trial.attempts and trial.outcome is None and attempt not in self._begun:
                self._begun[attempt] = time.monotonic()
                again = "" if trial.attempts == 1 else f", attempt {trial.attempts}"
                self._say(f"trial {number} starts{again}: {self._values(trial.values)}")
            if trial.ends > self._ends.get(number, 0):
                self._ends[number] = trial.ends
                if attempt in self._begun and trial.outcome is Outcome.FINISHED:
                    self._seconds.append(time.monotonic() - self._begun[attempt])
                self._say(f"trial {number} {self._ending(number)}; {self._rest()}")

    def _values(self, values: Mapping[str, str]) -> str:
        return ", ".join(f"{self._columns.get(path, path)} {text}" for path, text in values.items())

    def _ending(self, number: int) -> str:
        trial, spec = self._sweep.journal.history.trials[number], self._sweep.spec
        results = results_of(self._sweep.journal.history, spec, self._sweep.progress)
        own, best = next(one for one in results if one.number == number), best_of(results)
        said = str(trial.outcome) + (f" ({trial.cause})" if trial.cause else "")
        if own.value is not None:
            said += f", {spec.metric} {own.value:.6g}"
            said += ", the best so far" if best is not None and best.number == number else ""
        return said

    def _rest(self) -> str:
        trials = self._sweep.journal.history.trials.values()
        running = [one for one in trials if one.skipped is None]
        total = max(len(running), self._sweep.spec.num_trials or 0 if self._sweep.spec.method is Method.OPTUNA else 0)
        done = sum(one.is_done for one in running)
        left = seconds_left(self._seconds, total - done, self._sweep.slots.number)
        return f"{done} of {total} done" + ("" if left is None or done == total else f", about {_duration(left)} left")


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Returns a name for each path: its last part, where that is enough to tell them apart.

    Example:
        >>> _short_names(["trainer_args.learning_rate", "optimizer.lr", "head.lr"])
        {'trainer_args.learning_rate': 'learning_rate', 'optimizer.lr': 'optimizer.lr', 'head.lr': 'head.lr'}
    """
    last = [path.rsplit(".", 1)[-1] for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], role: Callable[[Sequence[str]], str]) -> list[Line]:
    """Returns aligned lines; numbers are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    is_text = [any(not _is_number(row[at]) for row in rows if row[at]) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, is_text, strict=True)
        ]
        return ("  " + "  ".join(cells)).rstrip()

    body = [Line(line(row), partial(styled, role(row))) for row in rows]
    return [Line(line(head), lambda text: styled("dim", text)), *body]


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True
