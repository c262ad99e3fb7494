"""Who started this process, for how many processes, and how many its config asks for.

Takes environment variables and command lines; gives words for people, and a `Wish`. Keeps true: nothing is started;
whoever starts a run itself, and has compared what it asks for with what it got, says so (`launched`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise

from forgather.processes import is_accelerate, process_facts

OURS = "FORGATHER_CHECKED"
"""The variable that `fgcli` hands to processes that it starts."""
_OPTION = r"--num[-_]processes(?:=(\d+))?"
_SETTING = r"(?m)^num_processes:\s*(\d+)"


@dataclass(frozen=True, slots=True)
class Wish:
    """How many processes a config asks for.

    Args:
        processes: on this machine: a number, "gpu" or "auto".
        config: the config's name.
        project_dir: the folder of its project.
    """

    processes: int | str
    config: str
    project_dir: str


wish: ContextVar[Wish | None] = ContextVar("wish", default=None)
"""What the config asks for that is being built for a run that nobody has started processes for."""
launched: ContextVar[bool] = ContextVar("launched", default=False)
"""True where a launcher of ours compares processes and config by itself."""


def started_by(environ: Mapping[str, str], program: str | None = None, *, parent: Sequence[str] | None = None) -> str:
    """Returns who started this process, for people, with what a launcher was asked for in vain.

    Args:
        environ: environment variables.
        program: what runs, as `sys.argv[0]`, which is the default.
        parent: the command line of the process that started this one; it is looked up by default.

    Example:
        >>> started_by({}, "/usr/bin/fgcli"), started_by({}, "/home/me/train.py")
        ('fgcli', 'python train.py')
    """
    launcher = process_facts(environ).launcher
    if launcher:
        return "fgcli" if OURS in environ and launcher == "torchrun" else launcher
    if is_accelerate(environ):
        asked = asked_of_accelerate(environ, _parent() if parent is None else parent)
        if asked is None or asked == 1:
            return "accelerate launch"
        return f"accelerate launch, which was asked for {asked} and starts one where there is no GPU"
    return _program(sys.argv[0] if program is None else program)


def _program(program: str) -> str:
    folder, name = os.path.split(program)
    if name in ("fgcli", "fgcli.exe") or (name == "__main__.py" and os.path.basename(folder) == "forgather"):
        return "fgcli"
    if "ipykernel" in sys.modules:
        return "a notebook"
    return f"python {name}" if name.endswith(".py") else "python"


def asked_of_accelerate(environ: Mapping[str, str], parent: Sequence[str]) -> int | None:
    """Returns how many processes `accelerate launch` was asked for; None where that cannot be seen.

    Args:
        environ: environment variables; they name the folder of its config file.
        parent: the command line of the launcher.

    Example:
        >>> asked_of_accelerate({"HF_HOME": "/nowhere"}, ["python", "accelerate", "launch", "--num_processes", "2"])
        2
    """
    if not any("accelerate" in word for word in parent):
        return None
    for word, after in pairwise([*parent, ""]):
        found = re.fullmatch(_OPTION, word)
        number = (found[1] or after) if found else ""
        if number.isdigit():
            return int(number)
    named = next((after for word, after in pairwise(parent) if word in ("--config_file", "--config-file")), None)
    file = named or accelerate_config(environ)
    try:
        with open(file or os.devnull, encoding="utf-8") as stream:
            found = re.search(_SETTING, stream.read())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def accelerate_config(environ: Mapping[str, str]) -> str | None:
    """Returns the file that `accelerate config` wrote on this machine; None where there is none."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    file = os.path.join(os.path.expanduser(home), "accelerate", "default_config.yaml")
    return file if os.path.isfile(file) else None


def _parent() -> list[str]:
    """Returns the command line of the process that started this one; nothing where the system does not tell it."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as stream:
            return os.fsdecode(stream.read()).split("\0")
    except OSError:
        return []
