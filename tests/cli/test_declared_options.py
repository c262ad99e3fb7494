"""Options of a config on the command line: flags, repeated options, and declarations that are wrong."""

import pytest

from forgather.cli.main import main
from tests.project.workbench import make_project

DECLARED = {
    "list": """\
dynamic_args:
  - {names: --fast, type: flag, help: be fast}
  - {names: [--no-log, -q], action: store_false}
  - {names: --tag, action: append, type: int, choices: [1, 2]}
""",
    "mapping": """\
dynamic_args:
  fast: {names: --fast, action: store_true, help: be fast}
  log: {names: [--no-log, -q], action: store_false}
  tag: {action: append, type: int, choices: [1, 2]}
""",
    "dlist": """\
dynamic_args: !dlist
  fast: {names: --fast, type: flag, help: be fast}
  gone: ~
  log: {names: [--no-log, -q], type: flag, action: store_false}
  tag: {names: --tag, action: append, type: int, choices: [1, 2]}
""",
}
MAIN = "main: [{{ fast | default('unset') }}, {{ no_log | default('unset') }}, {{ tag | default([]) | sum }}]\n"


@pytest.fixture(params=DECLARED)
def bench(request, tmp_path, monkeypatch):
    wrong = "wrong: {names: --wrong, typ: int}" if request.param != "list" else "- {names: --wrong, typ: int}"
    files = {
        "templates/configs/a.yaml": DECLARED[request.param] + MAIN,
        "templates/configs/wrong.yaml": f"{DECLARED[request.param]}  {wrong}\n{MAIN}",
    }
    monkeypatch.chdir(make_project(tmp_path / "p", files))


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("", "main: [unset, unset, 0]"),
        ("--fast", "main: [True, unset, 0]"),
        ("--no-log", "main: [unset, False, 0]"),
        ("--fast -q --tag 1 --tag 2 --tag 2", "main: [True, False, 5]"),
    ],
)
@pytest.mark.parametrize("config", ["a", "wrong"])
def test_a_flag_and_a_repeated_option_reach_the_templates(bench, capsys, config, words, printed):
    assert 0 == main(["-t", config, "pp", *words.split()])
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize("words", ["--fast 1", "--tag 3", "--tag", "--tag x"])
def test_what_an_option_does_not_take_is_wrong_usage(bench, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["-t", "a", "pp", *words.split()])
    assert 2 == ended.value.code


def test_the_help_lists_flags_and_names_what_is_wrong(bench, capsys):
    with pytest.raises(SystemExit):
        main(["-t", "wrong", "train", "--help"])
    said = capsys.readouterr().out

    assert "--fast " in said and "be fast" in said and "--no-log, -q" in said and "--tag {1,2}" in said
    assert "An option of the config is not listed: an option in 'dynamic_args' has no field 'typ'" in said


@pytest.mark.parametrize("words", ["--wrong 3", "--wrong=3", "--else 1"])
def test_a_wrong_declaration_stops_who_needs_it(bench, words, capsys):
    assert 1 == main(["-t", "wrong", "pp", *words.split()])
    assert "error[FG408]: an option in 'dynamic_args' has no field 'typ'" in capsys.readouterr().err


def test_a_wrong_declaration_is_an_error_of_check_and_a_warning_of_what_goes_on(bench, capsys):
    assert 1 == main(["-t", "wrong", "check"])
    assert "error[FG408]" in "".join(capsys.readouterr())
    assert 0 == main(["-t", "wrong", "construct", "main", "--tag", "1"])
    said = capsys.readouterr()
    assert "warning[FG408]" in said.err and "'unset', 'unset', 1" in said.out
