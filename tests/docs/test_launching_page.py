"""The commands on the page about starting runs are ones that `fgcli` takes."""

import re
import shlex
from pathlib import Path

import pytest

from forgather.cli.main import main
from tests.project.workbench import make_project

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
COMMANDS = [re.split(r" {2,}| > ", line.strip())[0] for line in PAGE.splitlines() if line.startswith("    fgcli ")]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    text = "meta: {nproc_per_node: 2}\nmain: !partial:int\n"
    monkeypatch.chdir(make_project(tmp_path / "P", {f"templates/configs/{name}.yaml": text for name in ("C", "ddp")}))
    # What `--devices` sets goes away with the test.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_would_run(command, bench, capsys):
    words = shlex.split(command.replace("-p P", "-p ."))[1:]
    at = words.index("train") + 1
    dry = [] if "--print" in words else ["--dry-run"]

    assert 0 == main([*words[:at], *dry, *words[at:]]), capsys.readouterr().err
    assert re.search("^processes   |^#!", capsys.readouterr().out, re.M)


def test_the_commands_were_found():
    assert 6 <= len(COMMANDS)
    assert any("--print slurm" in command for command in COMMANDS)
