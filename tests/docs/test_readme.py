"""The README tells the truth: its config is the file, its expansion is what `pp` prints, its commands run."""

import re
import shlex
from pathlib import Path

import pytest

from forgather import Project
from forgather.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    fgcli ")]
STATIC = [
    command
    for command in COMMANDS
    if command.split()[1] != "new" and not any(word in command for word in (" train", " construct", " ckpt "))
]


def test_the_config_in_the_readme_is_the_file():
    config = next(text for language, text in FENCED if language == "yaml")
    assert (ROOT / "projects/tiny_llama/templates/configs/fast.yaml").read_text() == config


def test_the_expansion_in_the_readme_is_what_the_config_expands_to():
    expansion = [text for language, text in FENCED if language == "yaml"][1]
    lines = [line for line in expansion.splitlines() if line.strip() and line.strip() != "..."]
    rendered = Project("fast.yaml", str(ROOT / "projects/tiny_llama")).rendered.text
    text = rendered.replace(str(ROOT), "/...").splitlines()
    at = 0
    for line in lines:
        assert line in text[at:], line
        at += text[at:].index(line)


def test_the_config_with_own_text_and_callback_is_without_findings(tmp_path):
    config = [text for language, text in FENCED if language == "yaml"][3]
    (tmp_path / "meta.yaml").write_text("name: mine\n")
    (tmp_path / "templates/configs").mkdir(parents=True)
    (tmp_path / "templates/configs/mine.yaml").write_text(config)
    project = Project("mine.yaml", str(tmp_path))
    callbacks = {entry.key: entry.value for entry in project.graph.targets["trainer_callbacks"].value.entries}
    assert [] == list(project.diagnostics)
    assert "callbacks.py:MyCallback" == callbacks["mine"].constructor


@pytest.mark.parametrize("command", STATIC)
def test_a_static_command_of_the_readme_runs(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == int(" diff " in command)
    assert "" != capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [command.partition(" --dry-run")[0] for command in COMMANDS if " train" in command and "my_project" not in command],
)
def test_a_train_command_of_the_readme_would_run(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert 0 == main([*shlex.split(command)[1:], "--dry-run"])
    assert re.search(r"forgather\.ml:(Accel|Pipeline)?Trainer", capsys.readouterr().out)


def test_the_config_of_several_processes_has_the_lines_of_its_file():
    config = [text for language, text in FENCED if language == "yaml"][2]
    file = (ROOT / "projects/parallel/templates/configs/fsdp2.yaml").read_text()
    kept = [line for line in file.splitlines() if not line.startswith(("-- set title", "-- set about"))]
    assert kept == config.splitlines()


def test_the_commands_were_found():
    assert {"ls", "explain"} <= {command.split()[1] for command in STATIC}
