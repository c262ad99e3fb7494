"""The examples of docs/diff.md are what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from forgather.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "diff.md").read_text()
EXAMPLES = re.findall(r"[Ii]n `(projects/\w+)`:\n\n    \$ fgcli (.*)\n((?:    .*\n|\n(?=    ))+)", PAGE)


@pytest.mark.parametrize(("project", "command", "shown"), EXAMPLES, ids=lambda text: text.split("\n")[0])
def test_an_example_is_what_the_command_prints(project, command, shown, monkeypatch, capsys):
    monkeypatch.chdir(ROOT / project)
    assert main(shlex.split(command)) in (0, 1)
    printed = capsys.readouterr().out.replace(str(ROOT), "/...")
    pieces = re.split(r"^    \.\.\.\n", shown, flags=re.M)
    at = 0
    for piece in pieces:
        text = "".join(line.removeprefix("    ") + "\n" for line in piece.splitlines())
        assert text in printed[at:], printed
        at = printed.index(text, at) + len(text)


def test_the_examples_were_found():
    assert len(EXAMPLES) >= 2
