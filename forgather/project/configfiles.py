"""The config files of a project.

Takes search folders, gives names and files. Keeps true: imports nothing of the stages, because `fgcli ls` asks every
time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from forgather.bounded import MAX_ENTRIES, TooManyEntriesError, walk_folders
from forgather.errors import ProjectError


def config_files(searchdir: Iterable[str], prefix: str) -> dict[str, str]:
    """Returns the file of each config by its name, in order; the first search folder that has a name wins.

    Raises:
        ProjectError: a search folder holds too much to be looked through.
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
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            if file.endswith(".yaml") and not file.startswith("."):
                path = os.path.join(here, file)
                yield os.path.relpath(path, top).replace(os.sep, "/"), path
