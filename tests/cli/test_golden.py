"""`fgcli golden`: what it prints, and its exit status."""

import json

import pytest

from forgather.cli.main import main
from tests.project.workbench import make_project

FILES = {
    "templates/configs/a.yaml": "main: {lr: 1, root: {{ project_dir }}}\n",
    "templates/configs/b.yaml": "main: 2\n",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", FILES)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def out(capsys):
    def run(*arguments):
        status = main(list(arguments))
        return status, capsys.readouterr().out

    return run


def test_goldens_are_written_compared_and_written_anew(bench, out):
    missing = "a.yaml  no golden: '--update' writes it\nb.yaml  no golden: '--update' writes it\n0 of 2 as before\n"

    assert (1, missing) == out("golden")
    assert (0, "goldens/a.yaml written\ngoldens/b.yaml written\n2 goldens changed\n") == out("golden", "--update")
    assert (0, "a.yaml  as before\nb.yaml  as before\n2 of 2 as before\n") == out("golden")
    assert (0, "0 goldens changed\n") == out("golden", "--update")


EXPECTED = """\
--- goldens/a.yaml
+++ a.yaml

main
  ~ lr: 1 -> 3  goldens/a.yaml:3 -> templates/configs/a.yaml:1

1 changed

a.yaml  1 changed
b.yaml  no config: '--update' removes the golden
0 of 2 as before
"""


def test_what_changed_is_told_as_diff_tells_it(bench, out):
    out("golden", "--update")
    (bench / "templates/configs/a.yaml").write_text(FILES["templates/configs/a.yaml"].replace("1", "3"))
    (bench / "templates/configs/b.yaml").unlink()

    assert (1, EXPECTED) == out("golden")
    assert (0, "goldens/a.yaml written\ngoldens/b.yaml removed\n2 goldens changed\n") == out("golden", "--update")


def test_one_config_alone(bench, out):
    assert (0, "goldens/b.yaml written\n1 golden changed\n") == out("golden", "b", "--update")
    assert (0, "b.yaml  as before\n1 of 1 as before\n") == out("golden", "b")
    assert 2 == out("golden", "c")[0]


def test_a_broken_config_is_trouble_and_the_others_are_compared(bench, capsys):
    main(["golden", "--update"])
    (bench / "templates/configs/a.yaml").write_text("main: [1\n")
    capsys.readouterr()

    assert 2 == main(["golden"])
    printed = capsys.readouterr()
    assert "a.yaml  cannot be compared\nb.yaml  as before\n1 of 2 as before\n" == printed.out
    assert "error[FG200]" in printed.err


def test_facts_for_tools(bench, out):
    out("golden", "a", "--update")
    (bench / "templates/configs/a.yaml").write_text("main: {lr: 2, root: {{ project_dir }}}\n")
    status, text = out("golden", "--json")
    a, b = json.loads(text)["goldens"]

    assert (1, "differs", "no golden") == (status, a["state"], b["state"])
    assert ("main.lr", 1, 2) == (
        a["differences"][0]["path"], a["differences"][0]["old"]["value"], a["differences"][0]["new"]["value"]
    )  # fmt: skip
