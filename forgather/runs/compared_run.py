"""One run as a side of a comparison: its record, its curves, and how it ended.

The input is a run folder; the output is a `ComparedRun`. Nothing is written into the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from forgather.bounded import read_bytes, walk_folders
from forgather.errors import Diagnostic, ForgatherError, ProjectError, Severity
from forgather.interventions import Intervention, read_interventions
from forgather.project.comparison import Compared
from forgather.project.comparison_sides import open_past_run
from forgather.project.fault_tolerance import resumes_from
from forgather.project.origin_labels import Labels
from forgather.project.path_display import near_path
from forgather.project.run_facts import is_run_folder
from forgather.project.run_reader import PastRun, open_run
from forgather.run_status import read_status
from forgather.runs.curve import Curve
from forgather.runs.curve_cache import METRICS_FILE, read_all
from forgather.runs.curves import Curves
from forgather.source import Span

SUMMARY_FILE = "summary.json"
_MAX_BYTES = 20_000_000
_UNFINISHED = ("killed", "failed", "interrupted", "did not finish")


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Args:
        run: the record of the run.
        side: the graph of the run, and the places of its values.
        curves: the metrics of the run.
        summary: the content of `summary.json`; empty if there is none.
        interventions: the changes that the user made to the run while it went on.
        earlier: the attempts that did not finish and that this run resumed after, the first one first.
    """

    run: PastRun
    side: Compared
    curves: Curves
    summary: Mapping[str, Any]
    interventions: Sequence[Intervention] = ()
    earlier: tuple[ComparedRun, ...] = ()

    @property
    def folder(self) -> str:
        """The folder of the run, as a user would type it."""
        return near_path(self.run.folder)

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return os.path.basename(self.run.folder)

    @property
    def config(self) -> str:
        """The name of the config, without its ending."""
        return self.run.config.removesuffix(".yaml")

    @cached_property
    def labels(self) -> Labels:
        """The labels of the places of values."""
        return Labels(self.side.place, lambda: self.side.declared)

    @cached_property
    def status(self) -> str:
        """What the run does, or how it ended, as one or two words."""
        beat = read_status(self.run.folder)
        if beat is not None:
            return str(beat.status)
        status = self.summary.get("status")
        # An older version wrote "running" at the start, and nothing if the run was killed.
        return str(status) if isinstance(status, str) and status != "running" else "did not finish"

    @cached_property
    def resumes(self) -> bool:
        """Whether the config lets the run go on from a checkpoint."""
        return resumes_from(self.side.graph) not in (None, False, "never")

    @property
    def last_step(self) -> int | None:
        """The last step with a metric; None if nothing was logged."""
        return max((curve.last_step for curve in self.curves.curves.values()), default=None)

    @property
    def max_steps(self) -> int | None:
        """The number of steps that the run was started for; None if it is not recorded."""
        found = self.summary.get("max_steps")
        return found if isinstance(found, int) else None

    def table(self, key: str) -> dict[str, Any]:
        """Returns a mapping in `summary.json`; an empty dict if the key is missing."""
        found = self.summary.get(key)
        return found if isinstance(found, dict) else {}

    def curve(self, metric: str) -> Curve | None:
        """Returns the curve of a metric; None if the run did not log it."""
        return self.curves.curves.get(metric)

    def best(self, metric: str, *, is_higher_better: bool) -> tuple[float, int] | None:
        """Returns the best finite value of a metric, and its first step; None if there is no such value."""
        curve = self.curve(metric)
        if curve is None:
            return None
        steps, values = curve.points()
        if not len(values):
            return None
        at = values.argmax() if is_higher_better else values.argmin()
        return float(values[at]), int(steps[at])

    def last(self, metric: str) -> tuple[float | None, int] | None:
        """Returns the last value of a metric, and its step; the value is None if it is not finite."""
        curve = self.curve(metric)
        if curve is None:
            return None
        if curve.ends_in_gap or curve.last is None:
            return None, curve.last_step
        return curve.last[1], curve.last[0]

    @property
    def notes(self) -> Iterator[Diagnostic]:
        """The findings about the files of the run."""
        yield from self.side.notes
        position = self.curves.position
        if position.num_damaged:
            lines = "1 line" if position.num_damaged == 1 else f"{position.num_damaged} lines"
            verb = "is" if position.num_damaged == 1 else "are"
            yield Diagnostic(
                code="FG542",
                message=f"{lines} of {METRICS_FILE!r} of the run {self.name!r} {verb} damaged and left out: "
                f"{position.damage}",
                severity=Severity.WARNING,
                span=Span(os.path.join(self.run.folder, METRICS_FILE), position.damaged[0]),
                hint="all other lines are used; a disk that was full or a machine that crashed leaves such lines",
            )


def open_compared(folder: str, curves: Curves | OSError) -> ComparedRun:
    """Returns the run in a folder as a side of a comparison.

    Args:
        folder: the run folder.
        curves: the curves of the run, or the error if they cannot be read.

    Raises:
        ProjectError: FG437 if the folder is not that of a run; FG438 if a part of its record is damaged; FG543 if its
            metrics cannot be read.
        ControlError: FG518 if the record of the changes that the user made to the run is damaged.
    """
    run = open_run(folder)
    if isinstance(curves, OSError):
        raise ProjectError(
            f"{METRICS_FILE!r} of the run {os.path.basename(run.folder)!r} cannot be read: {curves.strerror or curves}",
            code="FG543",
            span=Span(os.path.join(run.folder, METRICS_FILE), 1),
            hint="make the file readable, or leave this run out",
        ) from curves
    changes = read_interventions(run.folder)
    return ComparedRun(run, open_past_run(run.folder), curves, _summary(run.folder), changes)


def _summary(folder: str) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(os.path.join(folder, SUMMARY_FILE), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def run_folders(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the run folders that words of the command line name.

    Args:
        words: folders of runs, or folders that contain runs at any depth.

    Returns:
        The folders that were named themselves, and those that were found below a folder; each folder once.

    Raises:
        ProjectError: FG437 if a word is no folder; FG540 if there is no run below it.
    """
    named: dict[str, None] = {}
    below: dict[str, None] = {}
    for word in words:
        if is_run_folder(word):
            named[os.path.realpath(word)] = None
            continue
        if not os.path.isdir(word):
            # The error names runs nearby.
            open_run(word)
        found = list(_runs_below(word))
        if not found:
            raise ProjectError(
                f"there is no run at or below {word!r}",
                code="FG540",
                hint="a run's folder is <output folder>/runs/<time>-<config>; 'fgcli train' makes one",
            )
        below |= dict.fromkeys(found)
    return list(named), [folder for folder in below if folder not in named]


def _runs_below(top: str) -> Iterator[str]:
    for here, folders, _ in walk_folders(top):
        if is_run_folder(here):
            folders.clear()
            yield os.path.realpath(here)


def open_all(
    words: Sequence[str], *, is_full: bool = False, are_trials: bool = False
) -> tuple[list[ComparedRun], list[Diagnostic]]:
    """Returns the runs that words of the command line name, oldest first, and findings about them.

    A damaged run that was found below a folder is left out, with a finding; one that was named itself is an error. Runs
    below a folder that did not finish and after which another one resumed are attempts of that run.

    Args:
        words: folders of runs, or folders that contain runs.
        is_full: whether the curves keep every point.
        are_trials: whether the runs of one output folder are attempts of the last one, resumed or not.

    Raises:
        ProjectError: if there are fewer than two runs, or a run that was named cannot be read.
    """
    named, below = run_folders(words)
    if len(named + below) < 2:
        raise _too_few([os.path.relpath(folder) for folder in named + below])
    runs: list[ComparedRun] = []
    findings: list[Diagnostic] = []
    damaged: list[ForgatherError] = []
    for folder, curves in read_all(named + below, is_full=is_full):
        try:
            runs.append(open_compared(folder, curves))
            # Read now, so that a damaged graph is found here.
            findings += [*runs[-1].notes]
        except ForgatherError as error:
            if folder in named:
                raise
            damaged.append(error)
            findings.append(_left_out(error))
    if len(runs) < 2:
        raise _too_few([run.folder for run in runs], damaged)
    runs.sort(key=lambda run: (str(run.run.facts.get("started", "")), run.name))
    joined = _joined(runs, frozenset(named), are_trials=are_trials)
    return joined if len(joined) > 1 else runs, findings


def _joined(runs: Sequence[ComparedRun], named: Set[str], *, are_trials: bool) -> list[ComparedRun]:
    """Returns the runs, oldest first, without those that are attempts of a later one."""
    kept: dict[str, ComparedRun] = {}
    last: dict[str, str] = {}
    for run in runs:
        place = os.path.dirname(run.run.folder)
        before = kept.get(last.get(place, ""))
        is_attempt = before is not None and before.status in _UNFINISHED and before.run.folder not in named
        if before is not None and (are_trials or (is_attempt and run.resumes)):
            del kept[before.run.folder]
            run = replace(run, earlier=(*before.earlier, before))  # noqa: PLW2901 - the same run, which knows more
        kept[run.run.folder], last[place] = run, run.run.folder
    return list(kept.values())


def _too_few(folders: Sequence[str], damaged: Sequence[ForgatherError] = ()) -> ProjectError:
    only = f"only the run {os.path.basename(folders[0])!r}" if folders else "no run that can be read"
    more = f"; {len(damaged)} cannot be read: [{damaged[0].code}] {damaged[0].message}" if damaged else ""
    return ProjectError(
        f"there is {only}, and a comparison needs two{more}",
        code="FG540",
        hint=f"name another run, or look at its report: {os.path.join(folders[0], 'report.html')}" if folders
        else "'fgcli rerun RUN --dry-run' says what is wrong with a run",
    )  # fmt: skip


def _left_out(error: ForgatherError) -> Diagnostic:
    return Diagnostic(
        code=error.code or "FG438",
        message=f"{error.message}; the run is left out",
        severity=Severity.WARNING,
        span=error.span,
        hint=error.hint,
    )
