"""A comparison of runs as values: the ranking by a metric, what differs, and runs that differ in seeds alone.

The input is the runs; the output is a `Comparison`, which the terminal and the page show. A value that is not finite is
never the best. Runs without a finite value of the metric are not ranked, and listed as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forgather.errors import Diagnostic, Severity
from forgather.runs.compared_run import ComparedRun
from forgather.runs.differences import Differing, config_differences, fact_differences, is_only_seeds
from forgather.runs.metric_choice import MetricChoice, choose_metric, is_cost, is_higher_better, mean_of, stdev_of

_SHORTEST_NAME = 4


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in seeds alone, or a single run.

    Args:
        label: the name of the group.
        runs: the positions of its runs.
        values: the best value of the metric of each run that has one.
    """

    label: str
    runs: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """The mean of the best values; None if no run has one."""
        return mean_of(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation of the best values; None for fewer than two values."""
        return stdev_of(self.values) if len(self.values) > 1 else None


class Comparison:
    """Runs, compared by a metric.

    Args:
        runs: the runs, at least two.
        metric: the metric that the user names, or None.
        best: "min" or "max" if the user says which value is better, else None.

    Raises:
        ProjectError: FG541 if no run has the metric that the user names.
    """

    def __init__(self, runs: Sequence[ComparedRun], *, metric: str | None = None, best: str | None = None) -> None:
        self.runs = tuple(runs)
        self.choice: MetricChoice | None = choose_metric(
            [run.curves.metrics for run in runs], [run.table("arguments") for run in runs], wanted=metric, best=best
        )
        self.config = config_differences(self.runs)
        self.facts = fact_differences(self.runs)

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the metrics of all runs: the chosen one, others with a direction, and speeds and costs last."""
        names = list(dict.fromkeys(name for run in self.runs for name in run.curves.metrics))
        chosen = self.choice.name if self.choice else None
        return sorted(names, key=lambda name: (name != chosen, is_cost(name), self.direction(name) is None))

    def direction(self, metric: str) -> bool | None:
        """Returns whether a higher value of a metric is better; None if this is not known."""
        if self.choice is not None and metric == self.choice.name:
            return self.choice.is_higher_better
        return is_higher_better(metric)

    def best(self, at: int, metric: str) -> tuple[float, int] | None:
        """Returns the best value of a metric of a run and its step; None if there is none, or no value is better."""
        direction = self.direction(metric)
        return None if direction is None else self.runs[at].best(metric, is_higher_better=direction)

    @cached_property
    def settings(self) -> list[Differing]:
        """The config values that differ and are neither seeds nor names."""
        return [row for row in self.config if not row.is_seed and not row.is_label]

    def leader(self, row: Differing) -> Differing | None:
        """Returns the first setting that differs between the same runs, as values of two models do; None for itself."""
        first = next((other for other in self.settings if _partition(row) == _partition(other)), row)
        return None if first is row else first

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """A short name for each run: its config, and the values in which it differs from most runs of this config."""
        rows = [row for row in self.config if not row.is_label and self.leader(row) is None]
        return _unique(self._labels(rows), [run.name for run in self.runs])

    def _labels(self, rows: Sequence[Differing]) -> list[str]:
        counts = Counter(run.config for run in self.runs)
        return [self._label(at, rows, counts[run.config] > 1) for at, run in enumerate(self.runs)]

    def _label(self, at: int, rows: Sequence[Differing], has_others: bool) -> str:
        config = self.runs[at].config
        parts = []
        same = [other for other, run in enumerate(self.runs) if run.config == config] if has_others else [at]
        for row in rows:
            keys = Counter(row.keys[other] for other in same)
            value = row.values[at]
            # A value of most runs of the config is not what tells this run from the others.
            if len(keys) > 1 and (keys[row.keys[at]] * 2 <= len(same)):
                parts.append(f"{row.short_name} {value.text if value is not None else 'none'}")
        # The name of the config is left out if it is that of all runs.
        is_shared = parts and all(run.config == config for run in self.runs)
        return " · ".join(parts if is_shared else [config, *parts])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The runs in groups; the runs of a group differ in seeds alone. The best group is first."""
        rows = [row for row in (*self.config, *self.facts) if not row.is_seed and not row.is_label]
        keys = [row.keys for row in rows if row.kind != "hardware"]
        found: dict[tuple[Any, ...], list[int]] = {}
        for at, run in enumerate(self.runs):
            shared = found.setdefault(tuple(column[at] for column in keys), [])
            # Texts of values can be shortened; the graphs decide.
            if shared and not is_only_seeds(self.runs[shared[0]], run):
                shared = found.setdefault((at,), [])
            shared.append(at)
        plain = self._labels([row for row in self.settings if self.leader(row) is None])
        names = _unique(
            [plain[members[0]] for members in found.values()], [self.runs[m[0]].name for m in found.values()]
        )
        groups = [
            Group(
                label=name if len(members) > 1 else self.labels[members[0]],
                runs=tuple(members),
                values=tuple(value[0] for at in members if (value := self.chosen_best(at)) is not None),
            )
            for name, members in zip(names, found.values(), strict=True)
        ]
        return tuple(sorted(groups, key=lambda group: self._rank(group.mean)))

    def _rank(self, value: float | None) -> tuple[bool, float]:
        if value is None or self.choice is None:
            return True, 0.0
        return False, -value if self.choice.is_higher_better else value

    def chosen_best(self, at: int) -> tuple[float, int] | None:
        """Returns the best value of the chosen metric of a run, and its step; None if there is none."""
        return self.best(at, self.choice.name) if self.choice is not None else None

    @cached_property
    def ranking(self) -> tuple[int, ...]:
        """The positions of the runs, the best one first; runs without a value are last."""
        bests = [self.chosen_best(at) for at in range(len(self.runs))]
        return tuple(sorted(range(len(self.runs)), key=lambda at: self._rank(best[0] if (best := bests[at]) else None)))

    @property
    def has_seeds(self) -> bool:
        """Whether a group has several runs."""
        return len(self.groups) < len(self.runs)

    @property
    def notes(self) -> Iterator[Diagnostic]:
        """The findings about the comparison."""
        if self.choice is None:
            yield Diagnostic(
                code="FG544",
                message="no metric is in at least half of these runs, so that none of them is called the best",
                severity=Severity.WARNING,
                hint="name one: --metric NAME; what differs is compared nevertheless",
            )


def _partition(row: Differing) -> tuple[tuple[int, ...], ...]:
    """Returns which runs have the same value, whatever it is."""
    return tuple(map(tuple, distinct(row).values()))


def _unique(labels: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Returns labels, with the start of the run added where two runs have the same label."""
    counts = Counter(labels)
    told = [
        label if counts[label] == 1 else f"{label} · {name.split('-')[0] or name}"
        for label, name in zip(labels, names, strict=True)
    ]
    counts = Counter(told)
    seen: Counter[str] = Counter()
    for at, label in enumerate(told):
        seen[label] += 1
        told[at] = label if counts[label] == 1 else f"{label} #{seen[label]}"
    return tuple(told)


def distinct(row: Differing) -> dict[str | None, list[int]]:
    """Returns the positions of the runs with each value of a difference, in the order of the runs."""
    found: dict[str | None, list[int]] = {}
    for at, key in enumerate(row.keys):
        found.setdefault(key, []).append(at)
    return found


def is_close(first: Group, second: Group) -> bool | None:
    """Returns whether the means of two groups differ by less than the spread of their seeds; None without seeds."""
    spreads = [group.deviation for group in (first, second) if group.deviation is not None]
    if not spreads or first.mean is None or second.mean is None:
        return None
    return abs(first.mean - second.mean) < math.sqrt(sum(spread**2 for spread in spreads) / len(spreads))
