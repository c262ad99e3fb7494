"""Files that are near to one that a constructor names and that does not exist.

Takes a path, gives a hint. Keeps true: looks at names of files only, and opens none.
"""

from __future__ import annotations

import os
from difflib import get_close_matches

from forgather.errors import nearest


def near_file(name: str, file: str) -> str | None:
    """Returns what was meant by a file that does not exist.

    Args:
        name: the file as the config names it.
        file: its absolute path.
    """
    folder, base = os.path.split(file)
    if os.path.exists(file):
        return "it is a folder; name a .py file" if os.path.isdir(file) else "it is no plain file; name a .py file"
    if os.path.isdir(folder):
        found = _python_files(folder)
        close = get_close_matches(base, found, n=1, cutoff=0.6)
        return f"did you mean {os.path.join(os.path.dirname(name), close[0])!r}?" if close else nearest(base, found)
    meant = _near_folder(os.path.dirname(folder), os.path.basename(folder))
    written = os.path.dirname(os.path.dirname(name))
    if meant is None:
        return f"there is no folder {folder}"
    close = get_close_matches(base, _python_files(meant), n=1, cutoff=0.6)
    if close:
        return f"did you mean {os.path.join(written, os.path.basename(meant), close[0])!r}?"
    return f"there is no folder {folder}; did you mean {os.path.join(written, os.path.basename(meant))!r}?"


def _near_folder(parent: str, name: str) -> str | None:
    if not os.path.isdir(parent):
        return None
    folders = sorted(entry for entry in os.listdir(parent) if os.path.isdir(os.path.join(parent, entry)))
    close = get_close_matches(name, folders, n=1, cutoff=0.6)
    return os.path.join(parent, close[0]) if close else None


def _python_files(folder: str) -> list[str]:
    return sorted(
        entry for entry in os.listdir(folder) if entry.endswith(".py") and os.path.isfile(os.path.join(folder, entry))
    )
