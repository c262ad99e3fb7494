"""What the user trusts: folders whose code may run, packages that configs may call, variables that templates may read.

The input is the user's `trust.json` (in Forgather's config folder) and `FORGATHER_TRUST`; the output is a `Trust`, and
whether the templates in a folder may be loaded for a project. No file of a project can extend the trust. A folder is
identified by its real path. A `trust.json` that other users can write is refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from forgather.errors import ProjectError
from forgather.json_text import JsonFault, parse_json
from forgather.project.locations import config_dir

VARIABLE = "FORGATHER_TRUST"
"""The environment variable with further trusted folders (written with a slash) and packages, separated as in PATH."""
_PACKAGE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_KINDS = ("folders", "packages", "variables")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What a user trusts.

    Args:
        folders: the real paths of the trusted folders; their subfolders are trusted, too.
        packages: the names of packages that configs may import; a dotted name is a part of a package.
        variables: the names of environment variables that templates may read, with `*` as a wildcard.
    """

    folders: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def has_folder(self, folder: str) -> bool:
        """Returns whether the code of a folder is trusted."""
        real = os.path.realpath(folder)
        return any(is_inside(real, trusted) for trusted in self.folders)

    def has_package(self, name: str) -> bool:
        """Returns whether a package or module is trusted, by its own name or the name of a package that contains it."""
        words = name.split(".")
        parents = (".".join(words[:count]) for count in range(1, len(words) + 1))
        return "*" in self.packages or any(parent in self.packages for parent in parents)

    def plus(self, other: Trust) -> Trust:
        """Returns the union of this trust and another one."""
        both = {kind: tuple(dict.fromkeys((*getattr(self, kind), *getattr(other, kind)))) for kind in _KINDS}
        return Trust(**both)

    def minus(self, other: Trust) -> Trust:
        """Returns this trust without the entries of another one."""
        left = {kind: [item for item in getattr(self, kind) if item not in getattr(other, kind)] for kind in _KINDS}
        return Trust(**{kind: tuple(items) for kind, items in left.items()})


EVERYTHING = Trust(folders=(os.path.abspath(os.sep),), packages=("*",))
"""The trust of a Python caller who passes `trust=True`: all folders and packages."""


def trust_file() -> str:
    """Returns the path of the user's `trust.json`, whether the file exists or not."""
    return os.path.join(config_dir(), "trust.json")


def current_trust() -> Trust:
    """Returns what the user trusts now, by `trust.json` and the environment variable `FORGATHER_TRUST`.

    Raises:
        ProjectError: FG442 if `trust.json` is refused; FG443 if a word in `FORGATHER_TRUST` is neither a folder nor a
            package.
    """
    words = [word for word in os.environ.get(VARIABLE, "").split(os.pathsep) if word]
    return stored_trust().plus(parse_trust(words, _is_path))


def stored_trust() -> Trust:
    """Returns the content of the user's `trust.json`; an empty trust if there is no such file.

    Raises:
        ProjectError: FG442 if the file cannot be read, if another user owns it or can write it, or if it is malformed.
    """
    file = trust_file()
    try:
        with open(file, encoding="utf-8") as stream:
            # fstat checks the file that is open; the path could be replaced between a check and the read.
            facts = os.fstat(stream.fileno())
            text = stream.read()
    except FileNotFoundError:
        return Trust()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable_list(file, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o022):
        raise _unusable_list(file, "belongs to another user, or can be written by others", f"chmod 600 {file}")
    try:
        data = parse_json(text).value
        return Trust(**{kind: _text_list(data.get(kind, [])) for kind in _KINDS})
    except JsonFault as error:
        raise _unusable_list(file, f"is {error}, on line {error.line}") from None
    except (ValueError, AttributeError):
        raise _unusable_list(file, "is not a JSON object of lists of strings") from None


def _text_list(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError


def _unusable_list(file: str, why: str, hint: str | None = None) -> ProjectError:
    return ProjectError(
        f"the list of what you trust, {file!r}, {why}",
        code="FG442",
        hint=hint or "fix or remove it; 'fgcli trust DIR' writes a new one",
    )


def store_trust(trust: Trust) -> None:
    """Writes the user's `trust.json`, readable and writable by this user only.

    Raises:
        ProjectError: FG442 if the file cannot be written.
    """
    file = trust_file()
    facts = {kind: sorted(getattr(trust, kind)) for kind in _KINDS}
    draft = f"{file}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            stream.write(json.dumps(facts, indent=2) + "\n")
        # A rename replaces the file in one step: a reader never sees half of it.
        os.replace(draft, file)
    except OSError as error:
        raise _unusable_list(file, f"cannot be written: {error.strerror}", "check the folder's permissions") from error


def parse_trust(words: Iterable[str], is_folder: Callable[[str], bool] = os.path.isdir) -> Trust:
    """Returns the trust that a list of words describes.

    Args:
        words: the folders and packages, as a user writes them.
        is_folder: the function that returns whether a word is a folder; other words are names of packages.

    Raises:
        ProjectError: FG443 if a word is neither a folder nor the name of a package.
    """
    folders, packages = [], []
    for word in words:
        path = os.path.expanduser(word)
        if is_folder(path):
            folders.append(os.path.realpath(path))
        elif re.fullmatch(_PACKAGE, word):
            packages.append(word)
        else:
            raise ProjectError(
                f"{word!r} is neither a folder that exists nor the name of a package",
                code="FG443",
                hint="name a folder, as in 'fgcli trust .', or a package as an import names it",
            )
    return Trust(folders=tuple(folders), packages=tuple(packages))


def _is_path(word: str) -> bool:
    """Returns whether a word is written as a folder, with a dot in front or a slash.

    The spelling decides, because the working folder may contain a folder with the name of a package.
    """
    return word.startswith(".") or os.sep in word


def pass_to_processes(trust: Trust) -> None:
    """Adds a trust to `FORGATHER_TRUST`, so that processes which are started later trust the same code."""
    words = [*os.environ.get(VARIABLE, "").split(os.pathsep), *trust.folders, *trust.packages]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(word for word in words if word))


def add_trust(added: Trust) -> None:
    """Adds a trust to the user's `trust.json`.

    Raises:
        ProjectError: FG442 if the file is refused or cannot be written.
    """
    store_trust(stored_trust().plus(added))


def is_allowed_root(folder: str, project_dir: str, around: tuple[str | None, ...]) -> bool:
    """Returns whether templates in a folder may be loaded for a project.

    Args:
        folder: the absolute folder of the templates.
        project_dir: the absolute folder of the project.
        around: the further folders that may contain templates of the project, such as workspace and library.
    """
    real = os.path.realpath(folder)
    own = any(is_inside(real, os.path.realpath(root)) for root in _roots(project_dir, around))
    return own or current_trust().has_folder(real)


def _roots(project_dir: str, around: tuple[str | None, ...]) -> Iterator[str]:
    yield project_dir
    yield from (folder for folder in around if folder is not None)
    yield os.path.join(config_dir(), "templates")
    repository = _own_repository(project_dir)
    if repository is not None:
        yield repository


def _own_repository(folder: str) -> str | None:
    """Returns the nearest Git repository at or above a folder; None if there is none, or another user owns it."""
    current = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(current, ".git")):
        if current == os.path.dirname(current):
            return None
        current = os.path.dirname(current)
    # A shared folder may contain another user's repository around the project.
    is_own = not hasattr(os, "geteuid") or os.stat(current).st_uid == os.geteuid()
    return current if is_own else None


def is_inside(path: str, folder: str) -> bool:
    """Returns whether a path is a folder or inside it; both must be real paths."""
    # With a separator at the end, because `/a/bc` is not inside `/a/b`.
    return os.path.join(path, "").startswith(os.path.join(folder, ""))
