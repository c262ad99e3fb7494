"""The examples of docs/code.md are what the command prints."""

import re
import shlex
from pathlib import Path

import pytest

from forgather.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "code.md").read_text()
EXAMPLES = re.findall(r"In `(projects/\w+)`:\n\n    \$ fgcli (.*)\n((?:    .*\n|\n(?=\n?    ))+)", PAGE)


@pytest.mark.parametrize(("project", "command", "shown"), EXAMPLES, ids=lambda text: text.split("\n")[0])
def test_an_example_is_what_the_command_prints(project, command, shown, monkeypatch, capsys):
    monkeypatch.chdir(ROOT / project)
    assert 0 == main(shlex.split(command))
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    at = 0
    for piece in re.split(r"^    \.\.\.\n", shown, flags=re.M):
        text = "".join(line.removeprefix("    ") + "\n" for line in piece.splitlines())
        assert text in printed[at:], printed
        at = printed.index(text, at) + len(text)


def test_the_examples_were_found():
    assert 2 == len(EXAMPLES)
