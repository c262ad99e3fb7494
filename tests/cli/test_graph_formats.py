"""`fgcli graph`: which format is meant, where it goes, and what is opened."""

import webbrowser

import pytest

from forgather.cli.main import main
from tests.project.workbench import make_project

CONFIG = "tokenizer: &a !call:app:Tokenizer\nmain: !call:app:Trainer {x: 1, tokenizer: *a}\n"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": CONFIG})
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.html", "<!doctype html>"),
        ("a.mmd", "flowchart LR"),
        ("a.dot", "digraph"),
        ("a.gv", "digraph"),
        ("a", "tok"),
        ("a.txt", "tokenizer: &"),
        ("a.yaml", "tokenizer: &a !singleton"),
        ("a.json", "{"),
        ("a.mermaid", "flowchart LR"),
    ],
)
def test_the_name_after_o_tells_the_format(bench, name, begins):
    assert 0 == main(["graph", "-o", name])
    assert (bench / name).read_text().startswith(begins)


def test_a_format_that_is_named_is_meant_whatever_the_file_is_called(bench):
    assert 0 == main(["graph", "--format", "yaml", "-o", "a.html"])
    assert (bench / "a.html").read_text().startswith("tokenizer: &a !singleton")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a.svg", "Graphviz draws pictures: fgcli graph --format dot | dot -Tsvg"), ("a.htlm", "did you mean '.htm'?"),
     ("a.xyz", "it is one of .html, .mmd, .dot, .yaml, .json and .txt")],
)  # fmt: skip
def test_an_ending_that_means_no_format_is_refused_unless_one_is_named(bench, capsys, name, hint):
    assert 1 == main(["graph", "-o", name])
    printed = capsys.readouterr().err
    assert f"error[FG450]: no graph format has the ending '{name[1:]}'" in printed
    assert hint in printed
    assert not (bench / name).exists()
    assert 0 == main(["graph", "--format", "tree", "-o", name])
    assert f"wrote {name}\n" == capsys.readouterr().err


def test_another_program_gets_the_page(bench, capsys):
    assert 0 == main(["graph", "--format", "html"])
    assert "<title>a.yaml" in capsys.readouterr().out


def test_a_terminal_gets_no_page(bench, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert 1 == main(["graph", "--format", "html"])
    printed = capsys.readouterr()
    assert "" == printed.out
    assert "error[FG450]: a page is for a browser, not for the terminal" in printed.err
    assert "add -o page.html" in printed.err


def test_two_formats_at_once_are_refused(bench, capsys):
    assert 1 == main(["graph", "--json", "--format", "dot"])
    assert "error[FG450]: two formats are given: json and dot" in capsys.readouterr().err
    assert 0 == main(["graph", "--json", "--format", "json"])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [(["--open"], "it is not written to a file"), (["--open", "--format", "dot", "-o", "a.dot"], "the format is dot")],
)
def test_there_must_be_a_page_to_open(bench, capsys, arguments, found):
    assert 1 == main(["graph", *arguments])
    assert f"error[FG450]: there is no page to open: {found}" in capsys.readouterr().err
    assert not (bench / "a.dot").exists()


@pytest.mark.parametrize("found", [True, False])
def test_open_shows_the_page_in_the_browser(bench, capsys, monkeypatch, found):
    shown = []
    monkeypatch.setattr(webbrowser, "open", lambda address: shown.append(address) or found)
    assert 0 == main(["graph", "-o", "a.html", "--open"])
    assert [(bench / "a.html").as_uri()] == shown
    assert found != ("no browser was found; the page is a.html" in capsys.readouterr().err)


def test_a_flowchart_that_nobody_draws_is_told(bench, capsys):
    many = "a: &a !call:x:y\nmain: [" + "*a, " * 501 + "]\n"
    (bench / "templates/configs/many.yaml").write_text(many)
    assert 0 == main(["-t", "many", "graph", "--format", "mermaid"])
    printed = capsys.readouterr()
    assert printed.out.startswith("flowchart LR")
    assert "501 arrows" in printed.err


def test_options_and_set_change_the_picture(bench, capsys):
    assert 0 == main(["graph", "--format", "mermaid", "--set", "main.x=77"])
    assert "x: 77" in capsys.readouterr().out
