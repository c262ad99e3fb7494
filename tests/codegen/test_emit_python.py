"""A graph as Python: goldens, names, hostile texts, refusals, and that the layout is ruff's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from documents import graph_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import GraphMaker

from forgather.codegen.emit_python import Setting, emit_python
from forgather.codegen.python.ir import pieces, quoted, width
from forgather.codegen.python.names import identifier
from forgather.config.graph import Entry, Graph, Scalar
from forgather.errors import ForgatherError
from forgather.verification.prove import prove
from tests.golden import check_golden

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))
SEVERAL = {"sharing": ["main"], "names": ["main", "class", "my-model"]}


def code_of(case):
    graph = graph_of(case.read_text())
    setting = Setting(config=case.name, project="Cases", project_dir="/project", folder="/project/out")
    return graph, emit_python(graph, SEVERAL.get(case.stem, ["main"]), setting)


def ruff(*arguments, folder):
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length", "120", "--no-cache", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def assert_laid_out(folder):
    """Asserts that ruff neither formats nor reports anything in a folder."""
    formatted = ruff("format", "--diff", folder=folder)
    assert (0, "") == (formatted.returncode, formatted.stdout)
    checked = ruff("check", "--select", "E,F,I,B", "--output-format", "concise", folder=folder)
    assert 0 == checked.returncode, checked.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_case_is_written_as_its_golden(case):
    check_golden(case.with_suffix(".py.txt"), code_of(case)[1].text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_case_makes_the_calls_of_its_config(case):
    graph, code = code_of(case)
    prove(graph, code.text, code.targets, code.parameters, project_dir="/project", file="/project/out/x.py")


def test_the_cases_are_laid_out_as_ruff_would(tmp_path):
    for case in CASES:
        (tmp_path / f"{case.stem}_.py").write_text(code_of(case)[1].text, encoding="utf-8")
    assert_laid_out(tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.booleans())
def test_any_graph_that_can_be_written_makes_the_calls_of_its_config(seed, depth, several):
    graph = GraphMaker(seed, depth).graph()
    try:
        code = emit_python(graph, list(graph.targets) if several else ["main"])
    except ForgatherError as refusal:
        assert refusal.code in ("FG304", "FG332")
        return
    try:
        prove(graph, code.text, code.targets, code.parameters)
    except ForgatherError as refusal:
        # A !calc on what is no number, or a builtin with arguments that it does not take: not the code's fault.
        assert refusal.code in ("FG204", "FG208", "FG209", "FG305", "FG334"), (seed, refusal)


def test_a_circle_through_a_default_that_is_never_built_loses_no_sharing():
    graph = graph_of(
        "main: 1\none: !partial:m:c@made\n  args:\n    - &shared {}\n"
        '    - !var {name: given, default: !calc "one + two" }\n'
        "  kwargs: {key: [!var given ]}\n  latent_args: {late: 1}\ntwo: *shared\n"
    )
    code = emit_python(graph, list(graph.targets))
    prove(graph, code.text, code.targets, code.parameters)


def test_random_graphs_are_laid_out_as_ruff_would(tmp_path):
    for seed in range(150):
        graph = GraphMaker(seed, 2 + seed % 4).graph()
        try:
            code = emit_python(graph, list(graph.targets) if seed % 2 else ["main"])
        except ForgatherError:
            continue
        (tmp_path / f"seed_{seed}.py").write_text(code.text, encoding="utf-8")
    assert_laid_out(tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300))
def test_no_text_breaks_out_of_its_literal(text):
    if any("\ud800" <= char <= "\udfff" for char in text):
        return
    assert text == ast.literal_eval(quoted(text))
    assert text == ast.literal_eval(f"({' '.join(pieces(text) or [quoted(text)])})")
    assert all(width(piece) <= 100 for piece in pieces(text))
    graph = Graph(targets={"main": Entry("main", Scalar(value=text))})
    module: dict[str, object] = {"__name__": "generated"}
    exec(emit_python(graph, setting=Setting(config=text, project=text)).text, module)
    assert text == module["build"]()


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=60))
def test_any_name_of_a_target_gives_code_that_can_be_read(name):
    if any("\ud800" <= char <= "\udfff" for char in name):
        return
    graph = Graph(targets={name: Entry(name, Scalar(value=1)), "b": Entry("b", Scalar(value=2))})
    module: dict[str, object] = {"__name__": "generated"}
    exec(emit_python(graph, list(graph.targets)).text, module)
    built = module["build"]()
    assert 2 == (built if name == "b" else built["b"])
    assert identifier(name).isidentifier()


def test_a_string_with_half_a_character_is_refused():
    graph = Graph(targets={"main": Entry("main", Scalar(value="\ud800"))})
    with pytest.raises(ForgatherError, match=r"\[FG330\] a string contains U\+D800, half of a surrogate pair"):
        emit_python(graph)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("main: !call:m:f [!meta:m:g [1]]\n", "/project/t.yaml:1: [FG331] !meta:m:g takes its arguments unconstructed"),
        ("main: !call:.mod:f [1]\n", "[FG332] the relative module '.mod' has no folder to be searched in"),
        ("main: !call:lib/x:f [1]\n", "[FG332] 'lib/x' is not a Python file"),
        ("main: !call:getitem [1]\n", "[FG332] the arguments of 'getitem' do not match its parameters"),
        ("main: !call:x.py:f {submodule_searchpath: [!call:m:g ]}\n", "[FG332] submodule_searchpath has a member"),
        ("main: !calc main\n", "[FG304] !calc reads the target 'main' while that is being built from it"),
        ("main: !calc 'x.y'\n", "[FG305] !calc 'x.y': 'x.y' is not allowed"),
        ("main: !calc '1 in [1]'\n", "[FG305] !calc '1 in [1]': '1 in [1]' is not allowed"),
    ],
)
def test_what_cannot_be_written_is_refused_by_place(config, message):
    with pytest.raises(ForgatherError) as caught:
        emit_python(graph_of(config))
    assert message in str(caught.value)
    assert (1, "main") == (caught.value.span.line, caught.value.path[:4])


def test_code_without_a_trainer_runs_nothing():
    assert "__main__" not in emit_python(graph_of("main: [1]\n")).text
    assert "__main__" not in emit_python(graph_of("main: !call:m:f [!var x]\n")).text
    assert emit_python(graph_of("main: !partial:m:f [1]\n")).text.endswith('"__main__":\n    build()()\n')
    assert emit_python(graph_of("main: !call:m:f [1]\n")).text.endswith("elif callable(main):\n        main()\n")
    assert "trainer.save_model()" in emit_python(graph_of("main: !call:transformers:Trainer []\n")).text
    assert "save_model" not in emit_python(graph_of("main: !call:forgather.ml:Trainer []\n")).text


def test_folders_of_the_system_path_are_added_before_modules_in_them(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("thing = list\n")
    setting = Setting(project_dir=str(tmp_path), folder=str(tmp_path), system_path=(str(tmp_path / "src"),))
    code = emit_python(graph_of("main: !call:mine:thing [!call:json:dumps [1]]\n"), setting=setting)
    (tmp_path / "generated.py").write_text(code.text)
    assert_laid_out(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import generated; print(generated.build())"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ("['1']\n", "") == (done.stdout, done.stderr)


def test_a_file_of_the_project_finds_its_neighbors_and_shadows_no_library(tmp_path):
    (tmp_path / "json.py").write_text(
        "from . import blocks\nimport json\nsize = lambda: [blocks.size, json.dumps(1)]\n"
    )
    (tmp_path / "blocks.py").write_text("size = 3\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "more.py").write_text("from .deeper import size\nread = lambda: size\n")
    (tmp_path / "lib" / "deeper.py").write_text("size = 4\n")
    config = "main: [!call:json.py:size , !call:.more:read {submodule_searchpath: [lib]}]\n"
    (tmp_path / "out").mkdir()
    setting = Setting(project_dir=str(tmp_path), folder=str(tmp_path / "out"))
    (tmp_path / "out" / "generated.py").write_text(emit_python(graph_of(config), setting=setting).text)
    code = "import sys; sys.path.insert(0, 'out'); import generated; print(generated.build())"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ("[[3, '1'], 4]\n", "") == (done.stdout, done.stderr)
