"""The examples of docs/check.md are what the commands print, and its tables name what there is."""

import re
import shutil
from pathlib import Path

from forgather.cli.main import main
from forgather.rule_conditions import _FITS
from forgather.rules import Rules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "check.md").read_text()
YAML = re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1]
PYTHON = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
SHOWN = re.search(r"    \$ fgcli check mine\n((?:    .*\n|\n(?=    ))+)", PAGE)


def test_the_example_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tiny_llama"
    shutil.copytree(ROOT / "projects/tiny_llama", folder, ignore=shutil.ignore_patterns("output_models", "runs"))
    (folder / "templates/configs/mine.yaml").write_text(YAML)
    (folder / "callbacks.py").write_text(
        "class MyCallback:\n    def on_log(self, args, state, control, **others:\n        ...\n"
    )
    monkeypatch.chdir(folder)
    assert 1 == main(["check", "mine"])
    printed = capsys.readouterr().out
    assert "".join(line.removeprefix("    ") + "\n" for line in SHOWN[1].splitlines()) == printed


def test_every_command_of_the_page_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "projects/tiny_llama")
    commands = re.findall(r"^    fgcli (check[^#\n]*)", PAGE, re.M)
    assert [0] * 4 == [main(command.split()) for command in commands]


def test_the_check_from_python_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(PYTHON, "docs/check.md", "exec"), {})


def test_every_field_of_a_rule_and_every_type_is_named():
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE.partition("## Rules about settings")[2]))))
    assert {*Rules._fields, *_FITS} - {"quietly"} <= words
