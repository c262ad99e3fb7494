"""The config files of a project.

Takes search folders, gives names and files. Keeps true: imports nothing of the stages, because `fgcli ls` asks every
time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


def config_files(searchdir: Iterable[str], prefix: str) -> dict[str, str]:
    """Returns the file of each config by its name, in order; the first search folder that has a name wins."""
    found: dict[str, str] = {}
    for folder in searchdir:
        top = os.path.join(folder, prefix) if prefix else folder
        for here, folders, files in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for file in sorted(files):
                if file.endswith(".yaml") and not file.startswith("."):
                    name = os.path.relpath(os.path.join(here, file), top).replace(os.sep, "/")
                    found.setdefault(name, os.path.join(here, file))
    return dict(sorted(found.items()))
