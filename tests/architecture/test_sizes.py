"""Small rooms: limits on modules, functions and parameters, and no printing outside the command line."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "forgather").rglob("*.py"))
MODULE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 12
# Constructors whose keywords are the user's interface: "module.py:function" -> why.
MANY_PARAMETERS = {
    "trainer.py:__init__": "the keywords of a trainer are its interface",
    "errors.py:__init__": "the fields of an error",
    "optim.py:__init__": "the settings of an optimizer are its interface",
}


def functions(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_module_fits_in_one_head(file):
    assert len(file.read_text().splitlines()) <= MODULE_LINES


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_function_fits_on_one_screen(file):
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(file)}
    assert {} == {name: lines for name, lines in long.items() if lines > FUNCTION_LINES}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_function_takes_few_parameters(file):
    many = {}
    for f in functions(file):
        count = len(f.args.args) + len(f.args.kwonlyargs) + len(f.args.posonlyargs)
        if count > PARAMETERS and f"{file.name}:{f.name}" not in MANY_PARAMETERS:
            many[f.name] = count
    assert {} == many


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_only_the_command_line_prints(file):
    if "cli" in file.parts or file.name == "launch.py":
        return
    calls = [
        n.lineno
        for n in ast.walk(ast.parse(file.read_text()))
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"
    ]
    assert [] == calls


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_module_says_what_it_is(file):
    assert ast.get_docstring(ast.parse(file.read_text()))
