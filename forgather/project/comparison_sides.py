"""A past run, and what its config gives now, as sides of a comparison.

Takes the folder of a run, gives `Compared`. Keeps true: the config of now is given what the run was given (options,
`--set`, clock, host), so that only what was changed since is a difference.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime

from forgather.errors import ForgatherError, ProjectError
from forgather.project.comparison import Compared, code_digests, named_config, open_config, project_of_path
from forgather.project.configs import choose_config
from forgather.project.defaults import read_defaults
from forgather.project.dynamic_args import without_options
from forgather.project.metadata_cache import load_meta
from forgather.project.path_display import Display, near_path
from forgather.project.project import Project
from forgather.project.run_facts import is_run_folder
from forgather.project.run_reader import open_run
from forgather.project.template_environment import surroundings
from forgather.project.workspace import META_FILE, find_project
from forgather.spelling import close_matches


def open_past(folder: str) -> Compared:
    """Returns a run as it was.

    Raises:
        ProjectError: the folder is that of no run, or is damaged.
    """
    run = open_run(folder)
    return Compared(
        title=near_path(run.folder),
        graph=without_options(run.graph),
        place=run.place,
        config=run.config,
        code=code_digests(run.graph, run.archive),
        defaults=run.defaults,
        notes=run.notes,
        declared=run.rendered_again,
    )


def config_now(folder: str) -> Compared:
    """Returns what the config of a run gives now.

    Raises:
        ForgatherError: the project or the config is gone, or broken.
    """
    run = open_run(folder)
    try:
        meta = load_meta(find_project(run.project_dir))
        config = choose_config(meta, run.config)
    except ForgatherError as error:
        error.context = (*error.context, f"the config of the run {os.path.basename(run.folder)}")
        raise
    variables, overrides = run.changes
    now = surroundings(meta.searchpath, project_dir=meta.project_dir, workspace_root=meta.workspace_root)
    then = run.environment()
    told = {name: value for name, value in then.variables.items() if name in ("hostname", "uname") and value}
    environment = replace(now, now=then.now, variables={**now.variables, **told})
    project = Project.placed(meta, config, environment=environment, overrides=overrides, variables=variables)
    return Compared(
        title=f"{config} now",
        graph=without_options(project.graph),
        place=Display(meta.project_dir, meta.workspace_root),
        config=config,
        code=code_digests(project.graph, meta.project_dir),
        defaults=read_defaults(project.graph, meta),
        declared=project.graph,
    )


_LISTED = 3


def open_sides(a: str | None, b: str | None, config: str | None, folder: str | None) -> tuple[Compared, Compared]:
    """Returns both sides.

    Args:
        a: a config, its file, `CONFIG@REVISION`, or the folder of a run; None for the config that `-t` names, at its
            last commit.
        b: the same; None for what `a` is now.
        config: the config that a bare `@REVISION` means; None for the default.
        folder: the project that names are relative to; None for the nearest above the working folder.

    Raises:
        ForgatherError: one of them cannot be opened.
    """
    now = datetime.now()
    if a is not None and is_run_folder(a):
        return _sides_of_run(a, b, folder, now)
    name, revision = split_revision(a or "", folder)
    name = name or config or ""
    if b is None:
        # What there is not is told first: a name that was mistyped is no question for Git.
        new = _opened(name, None, folder, now) if revision is None else None
        old = _opened(name, "HEAD" if revision is None else revision, folder, now)
        return old, new or _opened(name, None, folder, now)
    old = _opened(name, revision, folder, now)
    if is_run_folder(b):
        return replace(old, graph=without_options(old.graph)), open_past(b)
    other, other_revision = split_revision(b, folder)
    return old, _opened(other or name, other_revision, folder, now)


def _sides_of_run(a: str, b: str | None, folder: str | None, now: datetime) -> tuple[Compared, Compared]:
    old = open_past(a)
    if b is None:
        return old, config_now(a)
    if is_run_folder(b):
        return old, open_past(b)
    name, revision = split_revision(b, folder)
    new = _opened(name or old.config, revision, folder, now)
    return old, replace(new, graph=without_options(new.graph))


def split_revision(word: str, folder: str | None) -> tuple[str, str | None]:
    """Returns the config and the revision of `CONFIG@REVISION`; the revision is None where there is none.

    Example:
        >>> split_revision("tiny@HEAD~3", None)
        ('tiny', 'HEAD~3')
    """
    if "@" not in word or os.path.exists(word):
        return word, None
    # A name may hold the sign too; the last one that leaves a config is meant.
    for at in (len(word), *(at for at in range(len(word) - 1, 0, -1) if word[at] == "@" and word[at : at + 2] != "@{")):
        try:
            named_config(word[:at], folder)
        except ForgatherError:
            continue
        return word[:at], word[at + 1 :] if at < len(word) else None
    name, _, revision = word.partition("@")
    return name, revision


def _nothing_named(word: str, folder: str | None, error: ProjectError) -> ProjectError:
    """Returns the error for a word that is neither a config nor a run of the project."""
    if error.code != "FG405" or error.span is not None:
        return error
    from forgather.project.run_reader import runs_of

    meta = load_meta(find_project(folder or project_of_path(word)))
    runs = {os.path.basename(run): os.path.relpath(run) for run in runs_of(meta.project_dir)}
    hint = error.hint or "'fgcli ls' lists the configs"
    near = close_matches(os.path.basename(word.rstrip(os.sep)), list(runs), n=_LISTED, cutoff=0.7)
    if near:
        hint = "did you mean " + " or ".join(runs[name] for name in near) + "?"
    elif runs:
        hint += f"; runs, newest first: {', '.join([*runs.values()][:_LISTED])}"
    return ProjectError(f"project {meta.name!r} has no config or run {word!r}", code="FG405", hint=hint, found=word)


def _opened(word: str, revision: str | None, folder: str | None, now: datetime) -> Compared:
    if os.path.isdir(word) and not os.path.isfile(os.path.join(word, META_FILE)):
        from forgather.project.run_reader import open_run

        open_run(word)  # it is none: the error names the runs that are near
    if revision is None:
        try:
            found = named_config(word, folder)
        except ProjectError as error:
            raise _nothing_named(word, folder, error) from None
        return open_config(*found, now)
    from forgather.project.revision import open_revision

    return open_revision(word, revision, folder, now)
