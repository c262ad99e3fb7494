"""`fgcli check` on the command line: which configs, what is printed, the exit status; `train` asks it first."""

import json

import pytest

from forgather.cli.main import main
from tests.project.workbench import fgcli, make_project

MAKER = "def make(size: int = 1): ...\n"
GOOD = "main: !call:maker.py:make {size: 2}\n"
BAD = """\
-- extends 'base.yaml'
[body]
first: !call:maker.py:make
  siez: 2
second: !call:maker.py:make {size: "3"}
main: !var seed
"""
BASE = """\
-- block body
-- endblock body
.spare: &spare 1
.also: !call:maker.py:mkae
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    files = {
        "templates/configs/good.yaml": GOOD,
        "templates/configs/bad.yaml": BAD,
        "templates/configs/odd.yaml": "main: !var seed\n",
        "templates/configs/none.yaml": "main: {{ nope }}\n",
        "templates/base.yaml": BASE,
        "maker.py": MAKER,
    }
    folder = make_project(tmp_path / "work" / "bench", files, meta="name: Bench\ndefault_config: good\n")
    make_project(tmp_path / "work" / "other", {"templates/configs/one.yaml": "main: 1\n"})
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def check(bench, capsys):
    def check(*arguments):
        status = main(["check", *arguments])
        return status, capsys.readouterr().out

    return check


def test_a_config_without_problems(check):
    assert (0, "good.yaml: ok\n") == check()


def test_all_problems_are_printed_by_file(check):
    status, out = check("bad.yaml")
    assert 1 == status
    assert out == (
        "templates/base.yaml:4: error[FG321]: 'maker.py' has no symbol 'mkae'\n"
        "    | .also: !call:maker.py:mkae\n"
        "    |                       ^^^^\n"
        "    in ['.also']\n"
        "    help: did you mean 'make'?\n"
        "templates/base.yaml:3: lint[FG230]: nothing uses the definition '.spare'\n"
        "    | .spare: &spare 1\n"
        "    | ^^^^^^\n"
        "    in .spare\n"
        "    help: remove it, or drop the '.' to make it a target\n"
        "templates/base.yaml:4: lint[FG230]: nothing uses the definition '.also'\n"
        "    | .also: !call:maker.py:mkae\n"
        "    | ^^^^^\n"
        "    in .also\n"
        "    help: remove it, or drop the '.' to make it a target\n"
        "\n"
        "templates/configs/bad.yaml:4: error[FG204]: make has no parameter 'siez'\n"
        "    |   siez: 2\n"
        "    |   ^^^^\n"
        "    in first\n"
        "    help: did you mean 'size'?\n"
        "templates/configs/bad.yaml:5: error[FG242]: make takes int as 'size' but gets the text '3'\n"
        '    | second: !call:maker.py:make {size: "3"}\n'
        "    |                                    ^^^\n"
        "    in second.size\n"
        "    help: a number in quotes is a text: write 3 without quotes\n"
        "templates/configs/bad.yaml:6: warning[FG244]: !var 'seed' has no default, and needs a value whenever this is "
        "built\n"
        "    | main: !var seed\n"
        "    |            ^^^^\n"
        "    in main\n"
        "    help: give it a default: !var {name: seed, default: ...}\n"
        "\n"
        "bad.yaml: 3 errors, 1 warning, 2 lints\n"
    )


def test_several_configs_and_the_sum(check):
    status, out = check("odd", "good")
    assert 0 == status
    assert out.endswith("odd.yaml: 1 warning\ngood.yaml: ok\n2 configs: 1 warning\n")


def test_strict_takes_warnings_for_errors(check):
    assert [0, 1, 0] == [check("odd")[0], check("odd", "--strict")[0], check("good", "--strict")[0]]


def test_every_config_of_the_project(check):
    status, out = check("--all")
    assert 1 == status
    for name in ("bad.yaml", "good.yaml", "none.yaml", "odd.yaml", "4 configs"):
        assert f"\n{name}: " in out
    assert "\ntemplates/configs/none.yaml:1: error[FG111]: " in out


def test_outside_any_project_all_means_every_project_below(check, bench, monkeypatch):
    monkeypatch.chdir(bench.parent)
    _, out = check("--all")
    assert "bench/bad.yaml: 3 errors" in out
    assert "other/one.yaml: ok" in out
    assert out.endswith("5 configs: 4 errors, 2 warnings, 2 lints\n")
    assert out == check("-r")[1]


def test_a_broken_project_is_among_the_findings(check, bench, monkeypatch):
    (bench.parent / "other" / "meta.yaml").write_text("name: [\n")
    monkeypatch.chdir(bench.parent)
    status, out = check("-r")
    assert 1 == status
    assert "other/meta.yaml: 1 error\n" in out
    assert "bench/good.yaml: ok" in out


def test_a_mistake_in_meta_yaml_is_a_finding_too(check, bench):
    (bench / "meta.yaml").write_text("name: Bench\ndefault_confg: good\n")
    status, out = check("good.yaml", "--json")
    (found,) = json.loads(out)["findings"]
    assert (1, "FG402", "meta.yaml", 2) == (status, found["code"], found["file"], found["line"])
    assert "meta.yaml: 1 error" in check()[1]


def test_the_same_finding_of_two_configs_is_printed_once_and_counted_twice(check, bench):
    (bench / "templates/configs/bad2.yaml").write_text("-- extends 'base.yaml'\n")
    _, out = check("bad", "bad2")
    assert 1 == out.count("'maker.py' has no symbol 'mkae'")
    assert "bad2.yaml: 1 error, 2 lints" in out


def test_json_lists_findings_and_what_was_not_checked(check):
    status, out = check("--json", "odd", "good", "bad")
    facts = json.loads(out)
    assert 1 == status
    assert ["odd.yaml", "good.yaml", "bad.yaml"] == facts["configs"]
    assert facts["findings"][0] == {
        "code": "FG244",
        "severity": "warning",
        "message": "!var 'seed' has no default, and needs a value whenever this is built",
        "file": "templates/configs/odd.yaml",
        "line": 1,
        "column": None,
        "path": "main",
        "hint": "give it a default: !var {name: seed, default: ...}",
        "config": "odd.yaml",
    }
    assert {"error", "warning", "lint"} == {found["severity"] for found in facts["findings"]}
    assert [] == facts["unchecked"]


def test_what_was_not_checked_is_listed_with_the_reason(check, bench):
    (bench / "templates/configs/c.yaml").write_text("main: !call:zlib:crc32 {data: x}\n")
    assert "not checked: " not in check("c")[1]
    status, out = check("c", "-v")
    assert 0 == status
    assert out.startswith("  not checked: main, zlib:crc32: ")
    assert out.endswith("c.yaml: ok, 1 not checked\n")
    assert ["zlib:crc32"] == [one["constructor"] for one in json.loads(check("c", "--json")[1])["unchecked"]]


def test_options_and_overrides_count(check):
    assert 1 == check("--set", "main.size=x")[0]


def test_names_and_all_exclude_each_other(bench, capsys):
    assert 1 == main(["check", "good", "--all"])
    assert "error[FG455]: configs are named together with --all or -r" in capsys.readouterr().err


def test_no_such_config(bench, capsys):
    assert 1 == main(["check", "goood"])
    assert "did you mean 'good'?" in capsys.readouterr().err


def test_train_refuses_errors_and_says_all_of_them(bench, capsys):
    assert 1 == main(["-t", "bad", "train"])
    err = capsys.readouterr().err
    assert ["error[FG321]", "error[FG204]"] == [w.split(":")[0] for w in err.split("\n") if w.startswith("error[")]
    assert err.endswith("  ... and 2 more: 'fgcli -t bad check' shows all\n")
    assert not (bench / "output_models").exists()


def test_train_without_the_check_finds_out_by_itself(bench, capsys):
    assert 0 == main(["-t", "odd", "train", "--no-check", "--dry-run"])
    assert 1 == main(["-t", "odd", "train", "--dry-run"])
    assert 1 == main(["-t", "bad", "train", "--no-check"])
    assert "FG301" in capsys.readouterr().err


def test_the_check_before_a_run_imports_nothing_heavy(bench):
    done = fgcli("-t", "bad", "train", cwd=bench, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert 1 == done.returncode
    assert not {"torch", "transformers", "numpy"} & {
        line.rpartition("|")[2].strip() for line in done.stderr.split("\n")
    }


def test_completion_offers_configs(bench):
    line = "fgcli check o"
    answer = bench / "answer"
    environment = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }  # fmt: skip
    fgcli(cwd=bench, env=environment)
    assert ["odd.yaml"] == [word.strip() for word in answer.read_text().split("\n")]
