"""What `--help` and completion may load."""

import pytest

from tests.project.workbench import fgcli

UNWANTED = ("jinja2", "ruamel", "torch", "numpy", "transformers", "importlib.metadata", "platformdirs", "argcomplete")
COMMANDS = ("ls", "pp", "graph", "targets", "trefs", "tlist", "check", "code", "construct", "train", "new", "explain")


def loaded(done):
    lines = [line for line in done.stderr.split("\n") if line.startswith("import time:")]
    return {line.rsplit("|", 1)[-1].strip() for line in lines}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["new", "--help"], ["explain", "FG400"]])
def test_what_needs_no_project_loads_no_library(tmp_path, arguments):
    done = fgcli(*arguments, cwd=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})

    assert 0 == done.returncode
    assert [] == [name for name in sorted(loaded(done)) if name.startswith(UNWANTED)]


def test_help_loads_no_command(tmp_path):
    done = fgcli("--help", cwd=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})

    assert [] == [name for name in loaded(done) if name.startswith("forgather.cli.commands.")]
    assert all(f"\n    {command} " in done.stdout for command in COMMANDS)
