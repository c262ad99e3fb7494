"""The command line in a fork of a process that has imported the product: for commands that import no library.

A process of its own takes three times as long, most of it to import. Takes words; gives what `subprocess.run` gives of
`python -m forgather`. Keeps true: the process that forks has run no command, and nothing that a command does is left there.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import forgather.cli
import forgather.codegen
import forgather.config
import forgather.project
import forgather.signatures
from forgather.cli.main import main
from tests.measured import measured

PACKAGES = (forgather.cli, forgather.codegen, forgather.config, forgather.project, forgather.signatures)


def run_forked(
    words: list[str], cwd: Path, env: dict[str, str] | None = None, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `fgcli` with these words, or a script, in a folder.

    Args:
        words: arguments of the command.
        cwd: the folder.
        env: variables beside those of this process; a folder in `PYTHONPATH` is searched first, as Python does.
        script: a Python file that runs instead of `fgcli`.
    """
    status, out, err = measured(_run, words, str(cwd), env or {}, None if script is None else str(script)).result
    return subprocess.CompletedProcess(words, status, out, err)


def _run(words: list[str], folder: str, env: dict[str, str], script: str | None) -> tuple[int, str, str]:
    os.chdir(folder)
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
    sys.argv = [script or "fgcli", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        try:
            status = main(words) if script is None else runpy.run_path(script, run_name="__main__") and 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        return status, *(_content(stream) for stream in (out, err))


def _content(stream: tempfile._TemporaryFileWrapper[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode()


# These import numpy, which no other command may load.
WITH_NUMPY = {"forgather.cli.commands.compare", "forgather.cli.comparison_output"}

# In the process that forks, so that no child imports them.
if "pytest" not in sys.modules:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in WITH_NUMPY:
                importlib.import_module(module.name)
