"""The examples of docs/blame.md are what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from forgather import Project
from forgather.cli.main import main
from forgather.config.insight.blame import blame

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "blame.md").read_text()
EXAMPLES = re.findall(r"[Ii]n `(projects/\w+)`:\n\n    \$ fgcli (.*)\n((?:    .*\n|\n(?=    ))+)", PAGE)


@pytest.mark.parametrize(("project", "command", "shown"), EXAMPLES, ids=lambda text: text.split("\n")[0])
def test_an_example_is_what_the_command_prints(project, command, shown, monkeypatch, capsys):
    monkeypatch.chdir(ROOT / project)
    status = main(shlex.split(command))
    captured = capsys.readouterr()
    printed = captured.err if status else captured.out
    at = 0
    for piece in re.split(r"^    \.\.\.\n", shown, flags=re.M):
        text = "".join(line.removeprefix("    ") + "\n" for line in piece.splitlines())
        assert text in printed[at:], printed
        at = printed.index(text, at) + len(text)


def test_blame_from_python_is_what_the_page_says():
    found = list(blame(Project("fast", str(ROOT / "projects/tiny_llama")).graph))
    assert len(found) > 100


def test_the_examples_were_found():
    assert 6 == len(EXAMPLES)


def test_every_word_of_the_output_is_explained():
    words = {"was", "set", "via", "alias *a", "merge <<", "inside *a", "with"}
    assert words <= set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.M))
