"""Opens both sides of `fgcli diff`: a config, a config at a Git revision, or a past run.

The input is the words of the command line; the output is two `Compared`. At a revision, the templates are read from the
revision, and so is the template library if it is part of the same repository. The variables of the templates are those
of the working tree, so that equal configs of two revisions give equal graphs. Errors name files as FILE@REVISION.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from forgather.errors import ForgatherError, ProjectError
from forgather.project.comparison import Compared, code_digests, named_config, open_config, project_of_path
from forgather.project.configs import choose_config, config_files
from forgather.project.defaults import read_defaults
from forgather.project.dynamic_args import without_options
from forgather.project.git_repository import Tree, open_tree
from forgather.project.locations import library_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.metadata_cache import load_meta
from forgather.project.metadata_file import Neighbors, read_meta
from forgather.project.path_display import Display, near_path
from forgather.project.project import Project
from forgather.project.run_facts import is_run_folder
from forgather.project.run_reader import open_run, runs_of
from forgather.project.template_environment import project_environment, template_environment
from forgather.project.workspace import META_FILE, WORKSPACE_FOLDER, find_project, find_workspace
from forgather.source import Span
from forgather.spelling import close_matches

_LAST = "HEAD"


def open_revision(word: str, revision: str, folder: str | None, now: datetime) -> Compared:
    """Returns a config at a Git revision as a side of a comparison.

    Args:
        word: the name of a config, the path of its file, the folder of a project, or "" for the default config.
        revision: the Git revision.
        folder: the project that names are relative to; None for the nearest project above the working folder.
        now: the time that clock functions return.

    Raises:
        ForgatherError: if there is no such revision or config, or the config is broken at that revision.
    """
    is_path = os.sep in word or word.endswith(".yaml") and os.path.isfile(word) or os.path.isdir(word)
    start = os.path.realpath(word) if word and is_path else os.path.realpath(find_project(folder))
    with open_tree(start, revision) as tree, _places_at_revision(tree):
        project_dir = _project_in(tree, start, word)
        meta = _meta(tree, project_dir)
        config = _config(tree, meta, start, word if not is_path else None)
        workspace = tree.real(meta.workspace_root) if meta.workspace_root else None
        environment = template_environment(meta.searchpath, project_dir=project_dir, workspace_root=workspace)
        project = Project.in_environment(meta, config, environment=replace(environment, now=now))
        display = Display(project_dir, workspace)
        return Compared(
            title=f"{config}@{revision}",
            graph=project.graph,
            # The private folder of the revision is removed, so places name the file in the working tree.
            place=lambda file: display(tree.real(file)),
            config=config,
            code=code_digests(project.graph, meta.project_dir),
            declared=project.graph,
        )


def _project_in(tree: Tree, start: str, word: str) -> str:
    """Returns the project that a name or path refers to at the revision, as a folder of the working tree."""
    folder = start
    while folder.startswith(tree.top):
        if tree.has(os.path.join(folder, META_FILE)):
            return folder
        if os.path.isfile(os.path.join(folder, META_FILE)):
            # A project further up is not the one that the user means.
            if tree.revision == _LAST:
                raise _not_committed(tree, folder)
            break
        folder = os.path.dirname(folder)
    raise ProjectError(
        f"{word or os.path.relpath(start, tree.top)!r} is in no project at {tree.revision}",
        code="FG436",
        hint=f"no {META_FILE!r} there at that revision; 'git log -- DIR' shows when it was added",
    )


def _not_committed(tree: Tree, project_dir: str) -> ProjectError:
    file = os.path.relpath(os.path.join(project_dir, META_FILE), tree.top)
    return ProjectError(
        f"the project is not in Git yet: the last commit has no {file!r}",
        code="FG436",
        hint="commit it, or compare two configs or runs: fgcli diff A B",
    )


def _meta(tree: Tree, project_dir: str) -> ProjectMeta:
    workspace: str | None = project_dir
    while workspace is not None and not tree.is_folder(os.path.join(tree.private_path(workspace), WORKSPACE_FOLDER)):
        workspace = None if workspace == tree.top else os.path.dirname(workspace)
    neighbors = Neighbors(
        workspace=tree.private_path(workspace) if workspace else find_workspace(os.path.dirname(tree.top)),
        library=_library(tree),
        repository=tree.private_path(tree.top),
        is_folder=tree.is_folder,
    )
    laid = tree.private_path(project_dir)
    # This writes the files of the project into the private folder, where `read_meta` reads them.
    tree.is_folder(laid)
    return read_meta(laid, neighbors)


def _library(tree: Tree) -> str:
    """Returns the template library at the revision if it is part of the repository, else the installed library."""
    laid = tree.private_path(os.path.realpath(library_dir()))
    return laid if tree.is_folder(laid) else library_dir()


def _config(tree: Tree, meta: ProjectMeta, start: str, name: str | None) -> str:
    if start == tree.real(meta.project_dir) or name is not None:
        return choose_config(meta, name or None)
    for config, file in config_files(meta.searchdir, meta.config_prefix).items():
        if tree.real(file) == start:
            return config
    raise ProjectError(
        f"{os.path.relpath(start, tree.top)!r} is not a config of project {meta.name!r} at {tree.revision}",
        code="FG436",
        hint="configs there: " + ", ".join(list(config_files(meta.searchdir, meta.config_prefix))[:9]),
    )


@contextmanager
def _places_at_revision(tree: Tree) -> Iterator[None]:
    """Context manager that changes the locations in errors to name the revision.

    The file in the working tree may have another text than the file at the revision.
    """
    try:
        yield
    except ForgatherError as error:
        # The private folder is removed before the error is shown.
        error.message = error.message.replace(tree.folder, tree.top)
        error.hint = error.hint and error.hint.replace(tree.folder, tree.top)
        context = [part.replace(tree.folder, tree.top) for part in error.context]
        error.context = tuple(context if error.code == "FG436" else [*context, f"at revision {tree.revision}"])
        if error.span is not None and error.span.file.startswith(tree.folder):
            file = os.path.relpath(error.span.file, tree.folder)
            error.span = Span(f"{file}@{tree.revision}", error.span.line, error.span.column)
        # Their places would name files of the private folder.
        error.others = ()
        raise


def open_past_run(folder: str) -> Compared:
    """Returns a past run as a side of a comparison.

    Raises:
        ProjectError: FG437 if the folder is not that of a run; FG438 if the record of the run is damaged.
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


def open_current_config(folder: str) -> Compared:
    """Returns the config of a run in its current state, as a side of a comparison.

    Raises:
        ForgatherError: if the project or the config does not exist anymore, or is broken.
    """
    run = open_run(folder)
    try:
        meta = load_meta(find_project(run.project_dir))
        config = choose_config(meta, run.config)
    except ForgatherError as error:
        error.context = (*error.context, f"the config of the run {os.path.basename(run.folder)}")
        raise
    variables, overrides = run.changes
    now = project_environment(meta)
    then = run.environment()
    # A config that names its folders after the host would otherwise differ on every other machine.
    host = {name: value for name, value in then.variables.items() if name in ("hostname", "uname") and value}
    # With the clock of the run, so that templates that print the time do not differ.
    environment = replace(now, now=then.now, variables={**now.variables, **host})
    project = Project.in_environment(meta, config, environment=environment, overrides=overrides, variables=variables)
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
    """Returns both sides of a comparison, the older one first.

    Args:
        a: the first side: a config, its file, `CONFIG@REVISION`, or the folder of a run; None for the config that
            `-t` names, at the last commit.
        b: the second side, named in the same way; None for the current state of `a`.
        config: the config that a bare `@REVISION` refers to; None for the default config.
        folder: the project that names are relative to; None for the nearest project above the working folder.

    Raises:
        ForgatherError: if one of the sides cannot be opened.
    """
    now = datetime.now()
    if a is not None and is_run_folder(a):
        return _sides_of_run(a, b, folder, now)
    name, revision = split_revision(a or "", folder)
    name = name or config or ""
    if b is None:
        # The config is opened first: a mistyped name is reported as such, not as a problem of Git.
        new = _open_side(name, None, folder, now) if revision is None else None
        old = _open_side(name, _LAST if revision is None else revision, folder, now)
        return old, new or _open_side(name, None, folder, now)
    old = _open_side(name, revision, folder, now)
    if is_run_folder(b):
        # The graph of a run is recorded without the declaration of options.
        return replace(old, graph=without_options(old.graph)), open_past_run(b)
    other, other_revision = split_revision(b, folder)
    return old, _open_side(other or name, other_revision, folder, now)


def _sides_of_run(a: str, b: str | None, folder: str | None, now: datetime) -> tuple[Compared, Compared]:
    old = open_past_run(a)
    if b is None:
        return old, open_current_config(a)
    if is_run_folder(b):
        return old, open_past_run(b)
    name, revision = split_revision(b, folder)
    new = _open_side(name or old.config, revision, folder, now)
    return old, replace(new, graph=without_options(new.graph))


def split_revision(word: str, folder: str | None) -> tuple[str, str | None]:
    """Returns the config and the revision that `word` names.

    In `CONFIG@REVISION`, the revision follows the "@". It is None if `word` is only the name of a config or an existing
    path.

    Args:
        word: the argument of the command line: `CONFIG`, `CONFIG@REVISION` or a path.
        folder: the project that names are relative to; None for the nearest project above the working folder.

    Example:
        >>> split_revision("tiny@HEAD~3", None)
        ('tiny', 'HEAD~3')
    """
    if "@" not in word or os.path.exists(word):
        return word, None
    # A config's name may contain '@' too, so the last one that leaves an existing config separates the revision.
    for at in (len(word), *(at for at in range(len(word) - 1, 0, -1) if word[at] == "@" and word[at : at + 2] != "@{")):
        try:
            named_config(word[:at], folder)
        except ForgatherError:
            continue
        return word[:at], word[at + 1 :] if at < len(word) else None
    name, _, revision = word.partition("@")
    return name, revision


def _nothing_named(word: str, folder: str | None, error: ProjectError) -> ProjectError:
    """Returns the error for a word that names neither a config nor a run of the project; other errors are unchanged."""
    if error.code != "FG405" or error.span is not None:
        return error
    meta = load_meta(find_project(folder or project_of_path(word)))
    runs = {os.path.basename(run): os.path.relpath(run) for run in runs_of(meta.project_dir)}
    hint = error.hint or "'fgcli ls' lists the configs"
    near = close_matches(os.path.basename(word.rstrip(os.sep)), list(runs), n=_LISTED, cutoff=0.7)
    if near:
        hint = "did you mean " + " or ".join(runs[name] for name in near) + "?"
    elif runs:
        hint += f"; runs, newest first: {', '.join([*runs.values()][:_LISTED])}"
    return ProjectError(f"project {meta.name!r} has no config or run {word!r}", code="FG405", hint=hint, found=word)


def _open_side(word: str, revision: str | None, folder: str | None, now: datetime) -> Compared:
    if os.path.isdir(word) and not os.path.isfile(os.path.join(word, META_FILE)):
        # The folder is neither a project nor a run: the error suggests runs near it.
        open_run(word)
    if revision is None:
        try:
            found = named_config(word, folder)
        except ProjectError as error:
            raise _nothing_named(word, folder, error) from None
        return open_config(*found, now)
    return open_revision(word, revision, folder, now)
