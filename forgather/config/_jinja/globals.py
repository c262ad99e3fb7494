"""The global functions of templates: clocks, paths, folders and environment variables.

`Globals` takes the time of the load, and its method `table` returns the global functions by name. Invariants: all clock
functions of one load use the same time, the time of the load; every environment variable that a template reads is
recorded, and no variable that looks secret can be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import platformdirs

from forgather.errors import RenderError

_SECRET = ("*_TOKEN", "TOKEN", "*_KEY", "*APIKEY", "*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*SECRET*", "*CREDENTIAL*",
           "*JWT*")  # fmt: skip
# Variables that name folders, or that launchers and schedulers set: their values are not secret.
_USUAL = ("HOME", "USER", "USERNAME", "LOGNAME", "HOSTNAME", "LANG", "PWD", "TMP", "TEMP", "TMPDIR", "SCRATCH", "WORK",
          "*_DIR", "*_PATH", "*_HOME", "*_ROOT", "*_FOLDER", "*_CACHE", "XDG_*", "SLURM_*", "PBS_*", "LSB_*", "OMPI_*",
          "CUDA_*", "NCCL_*", "ROCR_*", "HIP_*", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK",
          "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CONDA_PREFIX",
          "VIRTUAL_ENV", "HF_HUB_OFFLINE", "FORGATHER_*")  # fmt: skip
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_UNSAFE_IN_FILES = re.compile(r"[:+]")
# None is a default like any other.
_REQUIRED = object()
_APP = "forgather"


class Globals:
    """The global functions of one load.

    Args:
        instant: the time that all clock functions return; if it is None, the current time.
        allowed_env: a function that returns patterns for the names of further environment variables that templates may
            read.
    """

    def __init__(self, instant: datetime | None, allowed_env: Callable[[], Sequence[str]] = tuple) -> None:
        self._allowed_env = allowed_env
        self._now = instant if instant is not None else datetime.now()
        self.env_reads: dict[str, str] = {}

    def table(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions by their names in templates."""
        clocks = (self.isotime, self.utcisotime, self.filetime, self.utcfiletime, self.now, self.utcnow)
        paths = (os.path.normpath, os.path.abspath, os.path.relpath, os.path.dirname, os.path.basename)
        table: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*clocks, self.env, *paths)}
        table.update(
            joinpath=os.path.join,
            splitext=os.path.splitext,
            repr=_plain_repr,
            modname_from_path=_modname_from_path,
            user_home_dir=_user_home_dir,
            getcwd=_getcwd,
            forgather_config_dir=_forgather_config_dir,
            user_data_dir=_folder(platformdirs.user_data_dir),
            user_cache_dir=_folder(platformdirs.user_cache_dir),
            user_config_dir=_folder(platformdirs.user_config_dir),
            site_data_dir=_folder(platformdirs.site_data_dir),
            site_config_dir=_folder(platformdirs.site_config_dir),
        )
        return table

    def now(self) -> datetime:
        """The time of the load, as a `datetime` in local time."""
        # The clock of a past run has its time zone, and templates got the time without it.
        return self._now.replace(tzinfo=None)

    def utcnow(self) -> datetime:
        """The time of the load, as a `datetime` in UTC."""
        return self._now.astimezone(UTC)

    def isotime(self) -> str:
        """The time of the load in local time, as text of the form 2026-01-31T12:30:00."""
        # An instant with a time zone would add its offset to the text.
        return self._now.replace(tzinfo=None).isoformat(timespec="seconds")

    def utcisotime(self) -> str:
        """The time of the load in UTC, as text of the form 2026-01-31T12:30:00."""
        return self.utcnow().replace(tzinfo=None).isoformat(timespec="seconds")

    def filetime(self) -> str:
        """The time of the load in local time, as text for file names, of the form 2026-01-31T12-30-00."""
        return _UNSAFE_IN_FILES.sub("-", self.isotime())

    def utcfiletime(self) -> str:
        """The time of the load in UTC, as text for file names, of the form 2026-01-31T12-30-00."""
        return _UNSAFE_IN_FILES.sub("-", self.utcisotime())

    def env(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns the value of an environment variable, and records it for the run.

        Args:
            name: the name of the variable.
            default: the value to return if the variable is not set.

        Raises:
            RenderError: FG116 if the variable looks secret, or if it is not set and there is no default; FG446 if
                templates may not read it.
        """
        # First of all: a secret is refused even if the user's list allows its name.
        why = "looks secret" if _is_one_of(name, _SECRET) else None
        if why is None and _PASSWORD_IN_URL.search(os.environ.get(str(name), "")):
            why = "contains a URL with a password"
        if why is not None:
            raise RenderError(
                f"the environment variable '{name}' {why}, and a rendered config is stored with the run",
                code="FG116",
                hint=f"write `!env {name}`: it is read when the object is built, and never stored",
            )
        if not (_is_one_of(name, _USUAL) or _is_one_of(name, self._allowed_env())):
            raise RenderError(
                f"the environment variable '{name}' is not one that templates may read, and a rendered config "
                "is stored with the run",
                code="FG446",
                hint=f"write `!env {name}`, read at construction and never stored; or allow it for your templates: "
                f"fgcli trust --env {name}",
            )
        # The run stores what its templates read from the environment.
        if name in os.environ:
            self.env_reads[str(name)] = os.environ[name]
            return os.environ[name]
        if default is _REQUIRED:
            raise RenderError(
                f"the environment variable '{name}' is not set",
                code="FG116",
                hint=f"set it, give a default: env('{name}', '...'), or write `!env {name}`, read at construction",
            )
        self.env_reads[str(name)] = str(default)
        return default


def _is_one_of(name: object, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(str(name).upper(), pattern.upper()) for pattern in patterns)


def _plain_repr(value: Any) -> str:
    # A traced text is a subclass of str; the repr must be that of plain Jinja.
    return repr(str(value) if isinstance(value, str) else value)


def _modname_from_path(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _user_home_dir() -> str:
    return os.path.expanduser("~")


def _getcwd() -> str:
    return os.getcwd()


def _forgather_config_dir() -> str:
    return platformdirs.user_config_dir(_APP)


def _folder(function: Callable[..., str]) -> Callable[..., str]:
    # Only two of platformdirs' parameters are for templates; others could create folders.
    def folder(appname: str | None = None, appauthor: str | None = None) -> str:
        return function(appname, appauthor)

    folder.__name__ = function.__name__
    return folder
