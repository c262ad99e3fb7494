"""Folders outside projects: the packaged template library, the error pages, the user's config and cache folders.

An installed package and a clone that is not installed find the same files, and a cache folder is returned only if it is
private.
"""

from __future__ import annotations

import os
import stat
import sys

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def library_dir() -> str:
    """Returns the folder of the packaged template library."""
    return _shipped("templatelib", "templatelib")


def error_pages_dir() -> str:
    """Returns the folder that contains a page for each error code."""
    return _shipped("_errors", os.path.join("docs", "errors"))


def _shipped(inside_package: str, next_to_package: str) -> str:
    installed = os.path.join(_PACKAGE, inside_package)
    if os.path.isdir(installed):
        return installed
    return os.path.join(os.path.dirname(_PACKAGE), next_to_package)


def config_dir() -> str:
    """Returns Forgather's folder for the user's configuration, whether the folder exists or not."""
    return os.path.join(_user_folder("XDG_CONFIG_HOME", ".config", "user_config_dir"), "forgather")


def cache_dir(part: str) -> str | None:
    """Returns the private cache folder named `part`, which is created if missing; None if it cannot be created.

    The folder belongs to the current user and has mode 0700. `FORGATHER_CACHE=off` disables the cache.
    """
    if os.environ.get("FORGATHER_CACHE", "").lower() in ("off", "0", "no"):
        return None
    top = os.path.join(_user_folder("XDG_CACHE_HOME", ".cache", "user_cache_dir"), "forgather")
    folder = os.path.join(top, part)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder if _make_private(top) and _make_private(folder) else None
    except OSError:
        return None


def _make_private(folder: str) -> bool:
    # lstat, not stat: a link in a shared folder could lead to a folder of another user.
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    if facts.st_uid != os.geteuid():
        return False
    if stat.S_IMODE(facts.st_mode) & 0o077:
        os.chmod(folder, 0o700)
    return True


def _user_folder(variable: str, under_home: str, platformdirs_name: str) -> str:
    """Returns the user's folder for configuration or for caches.

    On Linux, the XDG rules are applied directly, because importing platformdirs takes longer than `fgcli ls`.
    """
    given = os.environ.get(variable, "")
    if os.path.isabs(given):
        return given
    if sys.platform.startswith("linux"):
        return os.path.join(os.path.expanduser("~"), under_home)
    import platformdirs

    return str(getattr(platformdirs, platformdirs_name)())
