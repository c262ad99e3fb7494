"""The result of a comparison in words: which run is best, by how much, and what differs.

The input is a `Comparison`; the output is sentences for the terminal and for the top of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forgather.runs.comparison import Comparison, Group, distinct, is_close
from forgather.runs.metric_choice import mean_of

_NAMED = 4
_DOMINANT = 0.5
"""The share of the variance from which a setting is said to matter most."""


@dataclass(frozen=True)
class Reason:
    """A value in which the best runs differ from the next ones.

    Args:
        name: the path of the value.
        value: the value of the best runs.
        place: the line that set it, or "".
        other: the value of the next runs.
        other_place: the line that set it, or "".
    """

    name: str
    value: str
    place: str
    other: str
    other_place: str


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Args:
        winner: the label of the best run, or of the best runs that differ in seeds alone; "" if there is none.
        result: the sentence after the label, which says how good it is and by how much it is better.
        next: the label of the next run or runs; "" if there is none.
        reasons: the values in which they differ.
        cause: what differs, in words, if it is not a value of the config.
        influence: a sentence about the value that explains most of the differences of all runs; "" if there is none.
        main_setting: the path of that value, or "".
        notes: sentences that a reader should know.
    """

    winner: str
    result: str
    next: str
    reasons: tuple[Reason, ...]
    cause: str
    influence: str
    notes: tuple[str, ...]
    main_setting: str = ""


def number_text(value: float | None) -> str:
    """Returns a number as text with five significant digits.

    Example:
        >>> [number_text(value) for value in (5.272235506, 12345678.0, 3e-5, 0.0, None)]
        ['5.2722', '1.2346e+07', '3e-05', '0', 'nan']
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None or math.isnan(value) else str(value)
    return f"{value:.5g}"


def verdict_of(comparison: Comparison) -> Verdict:
    """Returns the result of a comparison in words."""
    notes = tuple(_notes(comparison))
    ranked = [group for group in comparison.groups if group.mean is not None]
    if comparison.choice is None or not ranked:
        metric = comparison.choice.name if comparison.choice else None
        why = f"No run has a finite value of {metric}." if metric else "The runs have no metric to be ranked by."
        return Verdict("", why, "", (), "", "", notes)
    first, *others = ranked
    if not others:
        rest = len(comparison.groups) - 1
        more = f" The other {rest} have no finite value." if rest > 1 else " The other one has none." if rest else ""
        return Verdict(first.label, f"{_standing(comparison, first)}.{more}", "", (), "", "", notes)
    second = others[0]
    reasons = _reasons(comparison, first, second)
    cause = "" if reasons else _other_cause(comparison, first, second)
    text = f"{_standing(comparison, first)}, {_distance(first, second)}."
    if is_close(first, second):
        text += " The seeds spread by more than this, so it may be chance."
    main_setting, influence = _influence(comparison)
    return Verdict(first.label, text, second.label, reasons, cause, influence, notes, main_setting)


def _standing(comparison: Comparison, group: Group) -> str:
    metric = comparison.choice.name if comparison.choice else ""
    if len(group.values) > 1:
        spread = f" ± {number_text(group.deviation)}" if group.deviation is not None else ""
        return f"{metric} {number_text(group.mean)}{spread} (mean of {len(group.values)} seeds)"
    found = next(best for at in group.runs if (best := comparison.chosen_best(at)) is not None)
    return f"{metric} {number_text(found[0])} at step {found[1]:,}"


def _distance(first: Group, second: Group) -> str:
    best, other = first.mean or 0.0, second.mean or 0.0
    if best == other:
        return f"the same as {second.label}"
    percent = f" ({100 * abs(best - other) / abs(other):.2g} %)" if other else ""
    word = "higher" if best > other else "lower"
    return f"{number_text(abs(best - other))}{percent} {word} than {second.label}"


def _reasons(comparison: Comparison, first: Group, second: Group) -> tuple[Reason, ...]:
    found = []
    for row in comparison.settings:
        mine, theirs = row.values[first.runs[0]], row.values[second.runs[0]]
        if row.keys[first.runs[0]] != row.keys[second.runs[0]]:
            found.append(
                Reason(
                    row.name,
                    mine.text if mine else "not set",
                    mine.place if mine else "",
                    theirs.text if theirs else "not set",
                    theirs.place if theirs else "",
                )
            )
    return tuple(found)


def _other_cause(comparison: Comparison, first: Group, second: Group) -> str:
    """Returns what differs if the configs are the same."""
    pair = first.runs[0], second.runs[0]
    kinds = dict.fromkeys(row.kind for row in comparison.facts if row.keys[pair[0]] != row.keys[pair[1]])
    words = {"code": "the code", "version": "versions of packages", "data": "the data", "hardware": "the hardware"}
    if kinds:
        return f"The configs are the same. What differs: {', '.join(words[kind] for kind in kinds)}."
    if any(row.is_seed and row.keys[pair[0]] != row.keys[pair[1]] for row in comparison.config):
        return "The runs differ in seeds alone."
    return "The configs are the same, and so are code, versions, data and hardware."


def _influence(comparison: Comparison) -> tuple[str, str]:
    """Returns the path of the setting that explains most of the variance of the best values, and a sentence about it.

    Both are "" if no setting explains enough.
    """
    values = {at: best[0] for at in range(len(comparison.runs)) if (best := comparison.chosen_best(at)) is not None}
    found = []
    for row in comparison.settings:
        groups = [[values[at] for at in members if at in values] for members in distinct(row).values()]
        means = [(mean_of(group), len(group)) for group in groups if group]
        # With a value of its own for each run, everything would be explained.
        if 1 < len(means) <= len(values) / 2:
            found.append((_explained(means, list(values.values())), row))
    if not found:
        return "", ""
    share, row = max(found, key=lambda pair: pair[0])
    if share < _DOMINANT:
        return "", ""
    parts = []
    for members in distinct(row).values():
        held = [values[at] for at in members if at in values]
        if held and (value := row.values[members[0]]):
            parts.append((mean_of(held), f"{number_text(mean_of(held))} with {value.text} ({len(held)} runs)"))
    parts.sort(reverse=bool(comparison.choice and comparison.choice.is_higher_better))
    more = f", worse with {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    told = ", ".join(text for _, text in parts[:_NAMED])
    most = f"{row.name} matters most ({100 * share:.0f} % of the variance)"
    return row.name, f"Over all runs, {most}: on average {told}{more}."


def _explained(means: Sequence[tuple[float, int]], values: Sequence[float]) -> float:
    """Returns the share of the variance of values that is between the groups of which the means are given."""
    center = mean_of(values)
    # Divided by the largest distance, whose square may be no float.
    most = max((abs(value / 2 - center / 2) for value in values), default=0.0) or 1.0
    total = math.fsum(((value / 2 - center / 2) / most) ** 2 for value in values)
    between = math.fsum(count * ((mean / 2 - center / 2) / most) ** 2 for mean, count in means)
    return between / total if total else 0.0


def _notes(comparison: Comparison) -> Iterator[str]:
    choice = comparison.choice
    if choice is not None:
        yield f"{choice.name}: {choice.direction}; {choice.why}. The value of a run is its best one at any step."
        yield from _last_note(comparison)
        first = comparison.ranking[0]
        if first not in comparison.groups[0].runs:
            found = comparison.chosen_best(first)
            yield f"The best single run is {comparison.labels[first]}, with {number_text(found[0] if found else None)}."
        if not comparison.has_seeds and len(comparison.groups) > 1:
            yield "Each config ran once: how much of a difference is chance, only runs with other seeds can say."
        lacking = [at for at in range(len(comparison.runs)) if comparison.chosen_best(at) is None]
        if lacking:
            yield f"Without a finite value of {choice.name}: {_listed([comparison.labels[at] for at in lacking])}."
    gaps = [at for at, run in enumerate(comparison.runs) if any(c.num_gaps for c in run.curves.curves.values())]
    if gaps:
        yield f"With values that are not finite: {_listed([comparison.labels[at] for at in gaps])}."
    unfinished = [at for at, run in enumerate(comparison.runs) if run.status != "finished"]
    if unfinished:
        words = [f"{comparison.labels[at]} ({comparison.runs[at].status})" for at in unfinished]
        yield f"Not finished: {_listed(words)}."
    changed = [
        f"{comparison.labels[at]} ({_listed([one.text for one in changes])})"
        for at, run in enumerate(comparison.runs)
        if (changes := [one for part in (*run.earlier, run) for one in part.interventions if one.name])
    ]
    if changed:
        yield f"Changed by hand while they ran: {_listed(changed)}. Their configs do not say so."
    attempts = sum(len(run.earlier) for run in comparison.runs)
    if attempts:
        one = attempts == 1
        which = f"attempt{'' if one else 's'} that did not finish {'is' if one else 'are'} part of the run"
        yield f"{attempts} {which}{'' if one else 's'} that resumed after {'it' if one else 'them'}."
    ends = [run.last_step for run in comparison.runs if run.last_step is not None]
    if ends and min(ends) != max(ends):
        yield f"The runs end at different steps, from {min(ends):,} to {max(ends):,}."


def _last_note(comparison: Comparison) -> Iterator[str]:
    """Yields whether the best run got worse after its best step, which is then the checkpoint to use."""
    assert comparison.choice is not None, "a metric ranks the runs"  # noqa: S101
    at, name = comparison.ranking[0], comparison.choice.name
    best, last = comparison.chosen_best(at), comparison.runs[at].last(name)
    if best is not None and last is not None and last[0] != best[0]:
        value = "not finite" if last[0] is None else number_text(last[0])
        label = comparison.labels[at]
        yield f"{label} was best at step {best[1]:,}; at its end, at step {last[1]:,}, {name} is {value}."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
