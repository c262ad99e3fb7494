"""The config files of a project.

The input is the search folders of the project; the output is the names and files of its configs. The modules that
render and load configs are not imported, because `fgcli ls` lists the files of every project.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from forgather.bounded import MAX_CODE_BYTES, MAX_ENTRIES, TooManyEntriesError, read_text, walk_folders
from forgather.errors import ProjectError, nearest
from forgather.project.metadata import ProjectMeta
from forgather.source import Span


def config_files(searchdir: Iterable[str], prefix: str) -> dict[str, str]:
    """Returns the file of each config by name, sorted by name.

    If several search folders contain a config of the same name, the first of these folders is used.

    Args:
        searchdir: the absolute search folders.
        prefix: the folder of the configs inside each search folder.

    Raises:
        ProjectError: FG126 if a search folder contains too many files.
    """
    found: dict[str, str] = {}
    for folder in searchdir:
        top = os.path.join(folder, prefix) if prefix else folder
        try:
            for name, file in _yaml_files(top):
                found.setdefault(name, file)
        except TooManyEntriesError:
            raise ProjectError(
                f"the search folder {top!r} holds more than {MAX_ENTRIES:,} files and folders",
                code="FG126",
                hint="name the folder of the templates in 'searchdir' of meta.yaml, and keep data outside of it",
            ) from None
    return dict(sorted(found.items()))


def _yaml_files(top: str) -> Iterator[tuple[str, str]]:
    for here, folders, files in walk_folders(top):
        # Changed in place: `walk_folders` descends into what remains.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            if file.endswith(".yaml") and not file.startswith("."):
                path = os.path.join(here, file)
                yield os.path.relpath(path, top).replace(os.sep, "/"), path


def choose_config(meta: ProjectMeta, name: str | None = None) -> str:
    """Returns the name of a config, including `.yaml`.

    Args:
        meta: the project.
        name: the value of `-t`: a name or the path of a file; None for the default config.

    Raises:
        ProjectError: FG405 or FG407 if there is no such config; FG406 if no config is named and none is the default.
    """
    try:
        available = config_files(meta.searchdir, meta.config_prefix)
    except ProjectError as error:
        error.span = _searchdir(meta)
        raise
    if name is not None:
        return _existing(name, available, meta)
    if meta.default_config is not None:
        return _existing(meta.default_config, available, meta, in_meta=True)
    if len(available) == 1:
        return next(iter(available))
    if available:
        # A longer list would hide the message.
        listed = ": " + ", ".join(available) if len(available) < 10 else ""
        raise ProjectError(
            f"project {meta.name!r} has {len(available)} configs and no 'default_config'{listed}",
            code="FG406",
            hint=f"name one, as in -t {next(iter(available))}",
        )
    lost = meta.diagnostics[0] if meta.diagnostics else None
    raise ProjectError(
        f"project {meta.name!r} has no config" + (f": {lost.message}" if lost else ""),
        code="FG406",
        span=lost.span if lost else None,
        hint=f"put one under {_config_folder(meta)!r}, or make one with 'fgcli new config NAME'",
    )


def _searchdir(meta: ProjectMeta) -> Span | None:
    """Returns the location of `searchdir` in meta.yaml; None if the project has no files."""
    for file in meta.files[:1]:
        lines = read_text(file, MAX_CODE_BYTES).split("\n")
        return Span(file, next((number for number, line in enumerate(lines, 1) if line.startswith("searchdir")), 1))
    return None


def config_stem(config_name: str) -> str:
    """Returns the name of a config as templates see it: without suffix, with `.` for `/`.

    Example:
        >>> config_stem("ablations/small.yaml")
        'ablations.small'
    """
    return config_name.removesuffix(".yaml").replace("/", ".")


def template_name(meta: ProjectMeta, config_name: str) -> str:
    """Returns the name by which templates refer to a config.

    Args:
        meta: the project.
        config_name: the name of the config.
    """
    return f"{meta.config_prefix}/{config_name}" if meta.config_prefix else config_name


def _existing(name: str, available: dict[str, str], meta: ProjectMeta, *, in_meta: bool = False) -> str:
    for candidate in (name, f"{name}.yaml"):
        if candidate in available:
            return candidate
    # A path is relative to the working folder, which does not matter for a name in meta.yaml.
    by_file = None if in_meta else _of_file(name, available)
    if by_file is not None:
        return by_file
    if _leads_out(name):
        raise ProjectError(
            f"config {name!r} is outside the configs of project {meta.name!r}",
            code="FG407",
            span=meta.default_config_span if in_meta else None,
            hint=f"name a file under {_config_folder(meta)!r} by its path from there",
        )
    raise ProjectError(
        f"project {meta.name!r} has no config {name!r}",
        code="FG405",
        span=meta.default_config_span if in_meta else None,
        hint=_suggestion(name, list(available)) or f"put it under {_config_folder(meta)!r}",
        found=name,
    )


def _of_file(name: str, available: dict[str, str]) -> str | None:
    """Returns the config whose file is at a path relative to the working folder; None if there is none."""
    if not name.endswith(".yaml") or "\0" in name or not os.path.isfile(name):
        return None
    return next((config for config, file in available.items() if os.path.samefile(file, name)), None)


def _suggestion(name: str, available: list[str]) -> str | None:
    same_file = [config for config in available if os.path.basename(name) in (config, config.removesuffix(".yaml"))]
    if same_file:
        return f"did you mean {same_file[0]!r}?"
    bare = {config.removesuffix(".yaml"): config for config in available}
    wanted = name.removesuffix(".yaml")
    hint = nearest(wanted, list(bare))
    return hint or (f"{len(bare)} configs; 'fgcli ls' lists them" if bare else None)


def _leads_out(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return name.startswith(("/", "~")) or ".." in parts or "\0" in name or ":" in name


def _config_folder(meta: ProjectMeta) -> str:
    folder = meta.searchdir[0] if meta.searchdir else os.path.join(meta.project_dir, "templates")
    return os.path.relpath(os.path.join(folder, meta.config_prefix), meta.project_dir)
