"""Short names of files in messages: relative to the working folder or the project, or with `lib:` for the library.

The input is an absolute path; the output is a path relative to the working folder or the project, or a name that begins
with `lib:`.
"""

from __future__ import annotations

import os
import re

from forgather.project.locations import library_dir


class Display:
    """Shortens paths for one project.

    Args:
        project_dir: the absolute folder of the project; None outside a project.
        workspace_root: the absolute folder of the workspace; None outside a workspace.
        relative_to_cwd: whether names are relative to the working folder; False for names that are the same everywhere.
        library: the absolute folder of the template library; None for the installed library.

    Attributes:
        named: the absolute paths of the files that have been named so far, by short name.
    """

    def __init__(
        self,
        project_dir: str | None = None,
        workspace_root: str | None = None,
        *,
        relative_to_cwd: bool = True,
        library: str | None = None,
    ) -> None:
        self._library = library or library_dir()
        self._project = project_dir
        self.named: dict[str, str] = {}
        self._workspace = workspace_root
        cwd = working_folder() if relative_to_cwd else None
        # Everything is below the root, so it would shorten no name.
        self._folders = [folder for folder in (cwd, project_dir, workspace_root) if folder and folder != os.sep]

    def __call__(self, file: str) -> str:
        """Returns the short name of `file` and stores it in `named`; a path that is not absolute is unchanged."""
        if not os.path.isabs(file):
            return file
        name = self._name(file)
        self.named[name] = file
        return name

    def _name(self, file: str) -> str:
        # First, because the library of a clone may be inside one of the folders.
        inside = _inside(file, self._library)
        if inside is not None:
            return f"lib:{inside}"
        for folder in self._folders:
            inside = _inside(file, folder)
            if inside is not None:
                return inside
        return file

    def shorten(self, text: str) -> str:
        """Returns `text`, with short names in place of absolute paths."""
        text = re.sub(re.escape(self._library) + r"(?:/|\b(?![/\w.-]))", "lib:", text)
        for folder in self._folders:
            text = text.replace(folder + os.sep, "")
        return text

    def archive_name(self, file: str) -> str:
        """Returns a relative path for a copy of `file`; files in different root folders get different paths."""
        for label, root in (("lib", self._library), ("project", self._project), ("workspace", self._workspace)):
            inside = _inside(file, root) if root else None
            if inside is not None:
                return f"{label}/{inside}"
        return "other/" + file.strip("<>").lstrip(os.sep).replace(os.sep, "/").replace(":", "_")


def near_path(path: str) -> str:
    """Returns a path as a user would type it: relative if it is inside the working folder, else absolute."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith(os.pardir) else relative


def working_folder() -> str | None:
    """Returns the working folder; None if the folder was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _inside(file: str, folder: str) -> str | None:
    if not file.startswith(folder.rstrip(os.sep) + os.sep):
        return None
    return os.path.relpath(file, folder).replace(os.sep, "/")
