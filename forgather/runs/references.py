"""Which runs refer to another run: they repeat it, resumed after it, or use the model or a checkpoint of its folder.

The input is runs, and the runs around them; the output is the references. They are looked up before a run is removed,
since the record of a run is what explains the runs that were made from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forgather.project.run_facts import GRAPH
from forgather.runs.config_values import plain_value
from forgather.runs.metrics_file import read_content
from forgather.runs.summary import RunSummary

_TEXTS = re.compile(r'(?:^|: |- )("(?:[^"\\\n]|\\.)*"|[^\s&*!"\[{|>~][^\n]*)$', re.MULTILINE)
_RESUME = re.compile(r"^ +resume_from_checkpoint: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Reference:
    """A run that another run refers to.

    Args:
        run: the run that is referred to.
        referrer: the run that refers to it.
        how: what the referrer does with it, such as "repeats it".
    """

    run: RunSummary
    referrer: RunSummary
    how: str


def references_to(runs: Sequence[RunSummary], others: Sequence[RunSummary]) -> list[Reference]:
    """Returns the references of other runs to these runs.

    Args:
        runs: the runs that are referred to. References among them are left out.
        others: the runs that may refer to them.
    """
    chosen = {run.folder for run in runs}
    siblings = [*runs, *(other for other in others if other.folder not in chosen)]
    output_dirs = {folder for run in siblings if (folder := output_folder(run.folder)) is not None}
    found = []
    for other in siblings[len(runs) :]:
        for folder, how in _referred(other, siblings, output_dirs).items():
            if folder in chosen:
                found.append(Reference(next(run for run in runs if run.folder == folder), other, how))
    return found


def _referred(run: RunSummary, siblings: Sequence[RunSummary], output_dirs: set[str]) -> dict[str, str]:
    """Returns the run folders that a run refers to, and how."""
    others = output_dirs - {output_folder(run.folder)}
    found: dict[str, str] = {}
    graph = _graph(run)
    resumed = _RESUME.search(graph)
    value = None if resumed is None else plain_value(resumed[1])
    if value not in (None, False, "never", "~") and (parent := _latest(output_folder(run.folder), run, siblings)):
        found[parent] = "resumed after it"
    for path in _paths(graph, run):
        for output_dir in others.intersection(_with_parents(path)):
            if parent := _owner(path, output_dir, run, siblings):
                found[parent] = f"uses {os.path.relpath(path, os.path.dirname(output_dir))}"
    if run.rerun_of is not None:
        first = os.path.realpath(run.rerun_of)
        moved = [other.folder for other in siblings if other.name == os.path.basename(first)]
        parents = [first] if any(other.folder == first for other in siblings) else moved
        found |= dict.fromkeys(parents, "repeats it")
    return found


def _with_parents(path: str) -> Iterator[str]:
    while path != (parent := os.path.dirname(path)):
        yield path
        path = parent


def output_folder(run_dir: str) -> str | None:
    """Returns the output folder that contains a run folder now; None if the run folder is not in a folder `runs`."""
    parent = os.path.dirname(run_dir)
    return os.path.dirname(parent) if os.path.basename(parent) == "runs" else None


def _owner(path: str, output_dir: str, run: RunSummary, siblings: Sequence[RunSummary]) -> str | None:
    """Returns the run folder that a path in an output folder belongs to."""
    inside = [other.folder for other in siblings if path.startswith(f"{other.folder}{os.sep}")]
    return inside[0] if inside else _latest(output_dir, run, siblings)


def _latest(output_dir: str | None, run: RunSummary, siblings: Sequence[RunSummary]) -> str | None:
    """Returns the last run in an output folder that was started before a run: it wrote what the run found there."""
    before = [
        other
        for other in siblings
        if output_dir is not None
        and output_folder(other.folder) == output_dir
        and other.folder != run.folder
        and (other.started or 0.0, other.name) < (run.started or 0.0, run.name)
    ]
    return max(before, key=lambda other: (other.started or 0.0, other.name)).folder if before else None


def _graph(run: RunSummary) -> str:
    try:
        return read_content(os.path.join(run.folder, GRAPH)).decode("utf-8", "replace")
    except OSError:
        return ""


def _paths(graph: str, run: RunSummary) -> set[str]:
    """Returns the texts of a graph that may be paths, as absolute paths."""
    texts = {str(plain_value(text)) for text in _TEXTS.findall(graph) if os.sep in text}
    bases = [base for base in (run.project_dir, run.working_dir) if base]
    paths = {os.path.expanduser(text) for text in texts if "\0" not in text}
    absolute = {path for path in paths if os.path.isabs(path)}
    absolute |= {os.path.join(base, path) for path in paths - absolute for base in bases}
    return {os.path.realpath(path) for path in absolute}
