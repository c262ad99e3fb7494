"""Errors and suggestions for a missing file, module or symbol in the name of a constructor.

The input is a name; the output is an error or a hint. Invariants: construction and the static check report the same
error; only the names of files are read, never the contents of files.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence

from forgather.aliases import suggest_module, suggest_symbol
from forgather.config.builtin_names import SHORT
from forgather.errors import ResolveError, closest, nearest
from forgather.spelling import close_matches, same_letters

_MAX_LISTED = 2_000
_A_SLIP = 0.75
_NOT_SOURCES = ("output_models", "node_modules", "venv")


def _error(message: str, *, code: str, hint: str | None) -> ResolveError:
    # The variable has a type because mypy reads the result of this constructor as Any.
    error: ResolveError = ResolveError(message, code=code, hint=hint)
    return error


def missing_builtin(name: str) -> ResolveError:
    """Returns the error FG324 for a name that is neither a Python builtin nor a function of the config language."""
    known = [*SHORT, *(word for word in dir(builtins) if not word.startswith("_"))]
    return _error(f"no builtin named {name!r}", code="FG324", hint=nearest(name, known) or "write module:symbol")


def missing_file(name: str, file: str, project_dir: str) -> ResolveError:
    """Returns the error FG322 for a file that does not exist, or is not a Python file.

    Args:
        name: the name of the file as the config writes it.
        file: the absolute path of the file.
        project_dir: the folder that the name is relative to.
    """
    if os.path.isfile(file):
        return _error(f"{name!r} is not a Python file", code="FG322", hint="name a .py file")
    return _error(f"no file {name!r} in {project_dir}", code="FG322", hint=near_file(name, file, project_dir))


def missing_folders(name: str) -> ResolveError:
    """Returns the error FG325 for a relative module in a call without `submodule_searchpath`."""
    hint = "add submodule_searchpath: [FOLDER] to the call"
    return _error(f"the relative module {name!r} has no folder to be searched in", code="FG325", hint=hint)


def missing_relative_module(name: str, folders: Sequence[str], known: Sequence[str]) -> ResolveError:
    """Returns the error FG320 for a relative module that does not exist.

    Args:
        name: the name of the module, which begins with a dot.
        folders: the folders in which the module was searched.
        known: the names of the modules in these folders.
    """
    hint = nearest(name.lstrip("."), known)
    return _error(f"no module {name!r} in {', '.join(folders)}", code="FG320", hint=hint)


def missing_module(name: str, symbol: str, missing: str, known: Sequence[str], project_dir: str) -> ResolveError:
    """Returns the error FG320 for an absolute module that does not exist.

    Args:
        name: the dotted name of the module.
        symbol: the symbol that the config names in the module.
        missing: the part of the name that does not exist: the module, or a package around it.
        known: the names of the modules that exist next to the missing one.
        project_dir: the folder of the project.
    """
    hint = own_module(name, symbol, project_dir) or near_module(name, symbol, missing, known)
    if hint is None and "." in missing and not known:
        hint = f"{missing.rpartition('.')[0]!r} is a module, not a package"
    return _error(f"no module named {missing!r}", code="FG320", hint=hint)


def own_module(module: str, symbol: str, project_dir: str) -> str | None:
    """Returns a hint if a config names a project file as if it were a module on Python's path; otherwise None."""
    path = module.replace(".", "/")
    # `project_code.model:Net` would need the project on `sys.path`, which is never changed.
    for file, inside in ((f"{path}.py", symbol), (f"{path}/__init__.py", symbol)):
        if os.path.isfile(os.path.join(project_dir, file)):
            named = f"{file}:{inside}" if inside else file
            return f"did you mean {named!r}? A file of the project is named by its path"
    return None


def near_module(module: str, symbol: str, missing: str, known: Sequence[str]) -> str | None:
    """Returns a hint for a module that cannot be found.

    Args:
        module: the dotted name of the module.
        symbol: the symbol that the config names in the module.
        missing: the part of the name that does not exist: the module, or a package around it.
        known: the names of the modules that exist next to the missing one.
    """
    parent, _, leaf = missing.rpartition(".")
    prefix = f"{parent}." if parent else ""
    hint = suggest_module(module, symbol)
    slip = closest(leaf, known, cutoff=_A_SLIP) if hint is None else None
    if slip:
        return f"did you mean {prefix + slip!r}?"
    hint = hint or suggest_symbol(module, symbol)
    if hint is None and parent:
        return nearest(leaf, known, prefix=prefix)
    return hint or "install it, or check the name before the ':'"


def near_symbol(module: str, symbol: str, known: Sequence[str], own: Sequence[str] = ()) -> str | None:
    """Returns a hint for a symbol that a module does not have.

    Args:
        module: the module, or a class in a module.
        symbol: the symbol that does not exist.
        known: the symbols that exist.
        own: the symbols that the module defines, which are preferred to the symbols that it imports.
    """
    # A module has hundreds of imported names; a near one among its own definitions is the better guess.
    slip = same_letters(symbol, known) or closest(symbol, own, cutoff=_A_SLIP)
    if slip:
        return f"did you mean {slip!r}?"
    return suggest_symbol(module, symbol) or nearest(symbol, known, first=own)


def near_file(name: str, file: str, project_dir: str = "") -> str | None:
    """Returns a hint for a file that does not exist or is not a Python file.

    Args:
        name: the file as the config names it.
        file: the absolute path of the file.
        project_dir: the folder in which a file of the same name is searched; "" to search nowhere.
    """
    elsewhere = _of_that_name(os.path.basename(name), project_dir) if project_dir else None
    if elsewhere is not None and not os.path.exists(file):
        return f"did you mean {elsewhere!r}?"
    folder, base = os.path.split(file)
    if os.path.exists(file):
        return "it is a folder; name a .py file" if os.path.isdir(file) else "it is not a regular file; name a .py file"
    if os.path.isdir(folder):
        found = _python_files(folder)
        close = close_matches(base, found, n=1, cutoff=0.6)
        return f"did you mean {os.path.join(os.path.dirname(name), close[0])!r}?" if close else nearest(base, found)
    meant = _near_folder(os.path.dirname(folder), os.path.basename(folder))
    written = os.path.dirname(os.path.dirname(name))
    if meant is None:
        return f"there is no folder {folder}"
    close = close_matches(base, _python_files(meant), n=1, cutoff=0.6)
    if close:
        return f"did you mean {os.path.join(written, os.path.basename(meant), close[0])!r}?"
    return f"there is no folder {folder}; did you mean {os.path.join(written, os.path.basename(meant))!r}?"


def _of_that_name(base: str, project_dir: str) -> str | None:
    """Returns the path, relative to the project, of the only project file with that name; otherwise None."""
    found, seen = [], 0
    for folder, folders, files in os.walk(project_dir):
        # In place, which is how os.walk is told to skip folders.
        folders[:] = [one for one in folders if not one.startswith((".", "__")) and one not in _NOT_SOURCES]
        # A project may contain a data set of many files; then there is no suggestion.
        seen += len(files)
        if seen > _MAX_LISTED:
            return None
        if base in files:
            found.append(os.path.relpath(os.path.join(folder, base), project_dir).replace(os.sep, "/"))
    # Of two files with one name, neither is more likely.
    return found[0] if len(found) == 1 else None


def _near_folder(parent: str, name: str) -> str | None:
    if not os.path.isdir(parent):
        return None
    folders = sorted(entry for entry in os.listdir(parent) if os.path.isdir(os.path.join(parent, entry)))
    close = close_matches(name, folders, n=1, cutoff=0.6)
    return os.path.join(parent, close[0]) if close else None


def _python_files(folder: str) -> list[str]:
    return sorted(
        entry for entry in os.listdir(folder) if entry.endswith(".py") and os.path.isfile(os.path.join(folder, entry))
    )
