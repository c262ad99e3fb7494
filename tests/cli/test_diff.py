"""`fgcli diff`: what it prints, and its exit status."""

import json

import pytest

from forgather.cli.main import main
from tests.project.workbench import make_project

FILES = {
    "templates/project.yaml": "args: &args !singleton:m:f\n-- block args\n  lr: 0.1\n  steps: 10\n-- endblock\n"
    "main: !call:m:g\n  given: *args\n",
    "templates/configs/a.yaml": "-- extends 'project.yaml'\n",
    "templates/configs/b.yaml": "-- extends 'project.yaml'\n[args]\n  == super()\n  lr: 0.2\n  fused: true\n",
    "templates/configs/c.yaml": "-- extends 'project.yaml'\n[args]\n  lr: 0.1\n",
    "templates/configs/broken.yaml": "main: [1\n",
    "templates/configs/clock.yaml": "main: {{ now() }} {{ utcisotime() }}\n",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", FILES, meta="name: Bench\ndefault_config: a\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def out(capsys):
    """Runs a command and returns its status and what it printed."""

    def run(*arguments):
        status = main(list(arguments))
        return status, capsys.readouterr().out

    return run


EXPECTED = """\
--- a.yaml
+++ b.yaml

args  (also main.given)
  ~ lr: 0.1 -> 0.2  templates/project.yaml:3 -> templates/configs/b.yaml:4
  + fused: true     templates/configs/b.yaml:5

1 changed, 1 added
"""


def test_two_configs(bench, out):
    assert (1, EXPECTED) == out("diff", "a", "b")


def test_a_removed_key_names_the_line_that_wrote_it_and_the_block_that_took_it_away(bench, out):
    status, text = out("diff", "a", "c")

    assert "  - steps: 10  templates/project.yaml:4 -> templates/configs/c.yaml:3\n" in text


def test_the_same_graph(bench, out):
    assert (0, "no difference\n") == out("diff", "a", "a.yaml")
    assert (0, "no difference\n") == out("diff", "clock", "clock")


def test_paths_of_config_files_and_folders_of_projects_are_taken_from_anywhere(bench, out, monkeypatch):
    monkeypatch.chdir(bench.parent)

    assert 1 == out("diff", "bench/templates/configs/a.yaml", "bench/templates/configs/b.yaml")[0]
    assert 0 == out("diff", "bench", "bench/templates/configs/a.yaml")[0]
    assert 1 == out("-p", "bench", "diff", "a", "b")[0]


def test_facts_for_tools(bench, out):
    status, text = out("diff", "a", "b", "--json")
    facts = json.loads(text)
    value, added = facts["differences"]

    assert (1, "a.yaml", "b.yaml", False) == (status, facts["a"], facts["b"], facts["same"])
    assert ("value", "args.lr", ["main.given.lr"]) == (value["change"], value["path"], value["also"])
    assert {"text": "0.1", "value": 0.1, "file": "templates/project.yaml", "line": 3} == value["old"]
    assert ("added", "args.fused", None) == (added["change"], added["path"], added["old"])


def test_a_long_value_has_a_line_of_its_own(tmp_path, monkeypatch, out):
    files = {f"templates/configs/{name}.yaml": f"main: {name * 50}\n" for name in "ab"}
    monkeypatch.chdir(make_project(tmp_path, files))

    _, text = out("diff", "a", "b")

    assert f"main\n  ~ itself\n      {'a' * 50}  templates/configs/a.yaml:1\n   -> {'b' * 50}  " in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a", "d"), "FG405", "has no config or run 'd'"),
        (("a", "broken"), "FG200", "a '[' that is not closed"),
        (
            ("a", "templates"),
            "FG437",
            "'templates' is not the folder of a run: it has no 'run.json' and no 'graph.yaml'",
        ),
        (("a", "meta.yaml"), "FG430", "'meta.yaml' is a file, but not a config"),
        (("a", "templates/configs/d.yaml"), "FG405", "has no config or run 'templates/configs/d.yaml'"),
    ],
)
def test_trouble_has_a_status_of_its_own(bench, capsys, arguments, code, words):
    assert 2 == main(["diff", *arguments])

    error = capsys.readouterr().err
    assert f"error[{code}]: " in error
    assert words in error
    assert "  help: " in error


def test_colors_are_for_terminals(bench, monkeypatch, out):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, text = out("diff", "a", "b")

    assert "\x1b[33m  ~ lr: 0.1 -> 0.2" in text
    assert "\x1b[32m  + fused: true" in text
    assert "\x1b[1margs  (also main.given)" in text
