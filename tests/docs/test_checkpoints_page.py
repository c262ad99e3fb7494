"""The commands of docs/checkpoints.md run, and its table names the parts that there are."""

import re
import shlex
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.cli.parsing import build_parser
from tests.cli.checkpoint_folders import make_checkpoint

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/checkpoints.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in PAGE.splitlines() if line.startswith("    fgcli ")]


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if " ckpt " in command and "export" not in command]
)
def test_a_command_of_the_page_runs(command, tmp_path, monkeypatch, capsys):
    for step in (10, 20, 30):
        make_checkpoint(tmp_path / "out", step, best=10, metric=float(step))
    monkeypatch.chdir(tmp_path)
    assert 0 == main(shlex.split(command)[1:])
    assert "checkpoint-30" in capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in COMMANDS if " train " in command or "export" in command])
def test_the_options_of_the_page_are_there(command):
    words = shlex.split(command)[1:]
    parser, _, _ = build_parser("train" if "train" in words else "ckpt")
    assert parser.parse_args(words)


def test_the_table_of_parts_is_that_of_the_code():
    from forgather.ml.trainer.checkpoint_parts import EFFECTS_OF_MISSING

    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M))
    assert list(EFFECTS_OF_MISSING) == [name for name in rows if name in EFFECTS_OF_MISSING]
    assert all(rows[name].startswith(said) for name, said in EFFECTS_OF_MISSING.items())


def test_every_action_is_on_the_page():
    from forgather.cli.commands.ckpt import _ACTIONS

    assert all(f"fgcli ckpt {action} " in PAGE for action in _ACTIONS)
