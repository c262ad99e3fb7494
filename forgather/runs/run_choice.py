"""Which runs the words of a command line name: paths of run folders, or parts of the names of runs below a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forgather.errors import ProjectError
from forgather.runs.run_table import RunTable, read_table
from forgather.runs.summary import RunSummary
from forgather.spelling import close_matches

NEWEST = "last"
"""The word for the run that was started last."""
RUN_HELP = f"path of a run folder, a part of a name that only one run below this folder has, or '{NEWEST}'"
"""What a command says of an argument that `folder_of` reads."""
_LISTED = 5


def choose_runs(words: Sequence[str], top: str) -> list[RunSummary]:
    """Returns the runs that words name, each once, in the order of the words.

    Args:
        words: paths of run folders, parts of names that only one run below `top` has, or `last`.
        top: the folder below which names are looked for.

    Raises:
        ProjectError: FG500 if a word names no run, or several.
    """
    table: RunTable | None = None
    found: dict[str, RunSummary] = {}
    for word in words:
        run = _at_path(word)
        if run is None:
            table = read_table([top]) if table is None else table
            run = _named(word, table.runs, top)
        found[run.folder] = run
    return list(found.values())


def folder_of(word: str, top: str) -> str:
    """Returns the folder that a word names: a path as it is, or the folder of the run whose name it is.

    Args:
        word: the path of a folder, a part of a name that only one run below `top` has, or `last`.
        top: the folder below which names are looked for.

    Raises:
        ProjectError: FG500 if the word is no path and names no run, or several.
    """
    is_path = os.path.exists(word) or os.sep in word
    return word if is_path else choose_runs([word], top)[0].folder


def _at_path(word: str) -> RunSummary | None:
    """Returns the run whose folder has this path, or None if there is no such folder."""
    if not os.path.isdir(word):
        return None
    runs = read_table([word]).runs
    if [run.folder for run in runs] == [os.path.realpath(word)]:
        return runs[0]
    # `last` may be the name of a folder, too; a path with a slash means only the folder.
    if os.sep not in word:
        return None
    raise ProjectError(
        f"{word!r} is not the folder of a run",
        code="FG500",
        hint=f"runs there, newest first: {_list(runs)}" if runs else "a run's folder is <output folder>/runs/<name>",
    )


def _named(word: str, runs: Sequence[RunSummary], top: str) -> RunSummary:
    if word == NEWEST and runs:
        return runs[0]
    matches = [run for run in runs if run.name == word] or [run for run in runs if word and word in run.name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ProjectError(
            f"{word!r} is part of the names of {len(matches)} runs",
            code="FG500",
            hint=f"give more of the name, or a path: {_list(matches)}",
        )
    names = {run.name: run for run in runs}
    near = [names[name] for name in close_matches(word, list(names))]
    hint = "'fgcli train' makes a run" if not runs else f"newest first: {_list(runs)}"
    raise ProjectError(
        f"there is no run {word!r} below {os.path.relpath(top)!r}",
        code="FG500",
        hint=f"did you mean {_list(near)}?" if near else hint,
    )


def _list(runs: Sequence[RunSummary]) -> str:
    more = f" and {len(runs) - _LISTED} more" if len(runs) > _LISTED else ""
    names = [run.name for run in runs]
    shown = names if len(set(names)) == len(names) else [os.path.relpath(run.folder) for run in runs]
    return ", ".join(shown[:_LISTED]) + more
