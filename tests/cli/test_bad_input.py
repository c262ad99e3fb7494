"""Every mistake in a config or on the command line gets one located report of at most MAX_LINES lines."""

import re
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.cli.output import MAX_LINES
from tests.golden import check_golden
from tests.project.workbench import make_project

CASES = Path(__file__).with_name("cases")
BASE = """\
meta: {config_name: Base}
optimizer: &optimizer !partial:fractions:Fraction
-- block optimizer
  numerator: 1
-- endblock optimizer
lr_scheduler:
-- block lr_scheduler
  - 1
-- endblock lr_scheduler
main: *optimizer
"""
BROKEN = {
    "undefined_variable": "main:\n  lr: {{ learning_rate }}\n",
    "missing_template": "-- extends 'bsae.yaml'\n",
    "circular_template": "-- extends 'configs/circular_template.yaml'\n",
    "bad_indent_in_include": "main:\n  a: 1\n  -- include 'parts/indent.yaml'\n",
    "tab_in_include": "main:\n  a: 1\n  -- include 'parts/tab.yaml'\n",
    "undefined_anchor": "optimizer: &optimizer {lr: 1}\nmain: *optimzer\n",
    "unknown_tag": "main: !singelton:builtins:dict\n",
    "unclosed_if": "a: 1\n-- if a is defined\nmain: 1\n",
    "jinja_syntax_error": "main:\n  lr: {{ 1 + }}\n",
    "repeated_key": "main:\n  lr: 1\n  steps: 2\n  lr: 3\n",
    "misspelt_block": "-- extends 'base.yaml'\n[lr_schedulr]\n  - 2\n",
    "empty_file": "",
    "not_a_mapping": "- 1\n- 2\n",
    "second_document": "main: 1\n---\nmain: 2\n",
    "yaml_bomb": "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
    + "".join(f"{x}: &{x} [{', '.join(['*' + y] * 9)}]\n" for y, x in zip("abcdefg", "bcdefgh", strict=True)),
    "endless_loop": "main:\n-- for a in range(99999)\n-- for b in range(99999)\n  x: 1\n-- endfor\n-- endfor\n",
}
CONSTRUCTED = {
    "wrong_module": "main: !call:fractons:Fraction\n  numerator: 1\n",
    "wrong_symbol": "main: !call:fractions:Fracton\n  numerator: 1\n",
    "wrong_file": "main: !call:missing.py:make\n",
    "misspelt_keyword": "main: !call:fractions:Fraction\n  numeratr: 1\n",
    "missing_argument": "main: !call:textwrap:indent\n  text: a\n",
    "unbound_var": "main:\n  run_dir: !var run_dir\n",
    "unknown_target": "mian: 1\n",
    "constructor_raises": "main:\n  half: !call:maker.py:make\n    size: -1\n",
    "cycle_in_calc": "a: !calc 'b + 1'\nb: !calc 'a + 1'\nmain: !calc 'a'\n",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    parts = {
        "templates/base.yaml": BASE,
        "templates/parts/indent.yaml": "b:\n    c: 1\n   d: 2\n",
        "templates/parts/tab.yaml": "b:\n\tc: 1\n",
        "maker.py": "def make(size):\n    if size < 0:\n        raise ValueError(f'size is {size}')\n",
    }
    configs = {f"templates/configs/{name}.yaml": text for name, text in (BROKEN | CONSTRUCTED).items()}
    folder = make_project(tmp_path / "bench", parts | configs)
    (folder / "templates/configs/binary.yaml").write_bytes(bytes(range(256)))
    (folder / "templates/configs/latin.yaml").write_bytes("main: caf\xe9\n".encode("latin-1"))
    (folder / "templates/configs/folder.yaml").mkdir()
    monkeypatch.chdir(folder)
    return folder


def report_of(arguments, capsys, folder):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status not in (0, None)
    assert "forgather/c" not in error, "no frame of ours"
    assert "Traceback" not in error
    assert MAX_LINES >= error.count("\n"), error
    return f"exit status {status}\n{error}".replace(str(folder.parent), "<tmp>")


@pytest.mark.parametrize("name", BROKEN)
def test_a_config_that_cannot_be_read(name, bench, capsys):
    check_golden(CASES / f"{name}.txt", report_of(["-t", name, "graph"], capsys, bench))


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_a_config_that_cannot_be_built(name, bench, capsys):
    check_golden(CASES / f"{name}.txt", report_of(["-t", name, "construct", "main"], capsys, bench))


@pytest.mark.parametrize("name", ["binary", "latin", "folder"])
def test_a_file_that_is_no_text(name, bench, capsys):
    check_golden(CASES / f"{name}.txt", report_of(["-t", name, "pp"], capsys, bench))


COMMAND_LINES = {
    "no_such_config": ["-t", "base_yaml", "pp"],
    "no_such_project": ["-p", "bensh", "pp"],
    "no_config_chosen": ["pp"],
    "config_leads_out": ["-t", "../../secret", "pp"],
    "no_such_command": ["trian"],
    "no_command": [],
    "unknown_argument": ["-t", "unbound_var", "graph", "--fromat", "yaml"],
    "argument_after_the_command": ["pp", "-t", "unbound_var"],
    "argument_before_the_command": ["--json", "-t", "unbound_var", "train"],
    "set_without_value": ["-t", "unbound_var", "graph", "--set", "main"],
    "set_of_a_path_that_does_not_exist": ["-t", "unbound_var", "graph", "--set", "main.run_dri=1"],
    "set_of_a_malformed_path": ["-t", "unbound_var", "graph", "--set", "main..a=1"],
    "set_of_a_malformed_value": ["-t", "unbound_var", "graph", "--set", "main.run_dir=[1"],
    "wrong_format": ["-t", "unbound_var", "graph", "--format", "xml"],
    "unwritable_output": ["-t", "unbound_var", "pp", "-o", "missing/out.yaml"],
    "no_such_code": ["explain", "FG099"],
    "config_of_a_command_about_none": ["-t", "unbound_var", "ls"],
    "two_folders": ["-p", ".", "ls", "templates"],
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_command_line_that_cannot_be_followed(name, bench, capsys):
    check_golden(CASES / f"{name}.txt", report_of(COMMAND_LINES[name], capsys, bench))


def test_a_run_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    config = "meta: {output_dir: taken}\nmain: !partial:builtins:print [x]\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": config, "taken": "a file"})
    monkeypatch.chdir(folder)

    text = report_of(["train"], capsys, folder)

    check_golden(CASES / "unwritable_run_folder.txt", _without_time(text))


def _without_time(text):
    return re.sub(r"\d{8}T\d{6}Z", "<time>", text)
