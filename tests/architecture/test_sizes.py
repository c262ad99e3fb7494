"""Small rooms: limits on modules, functions and parameters, and no printing past the console."""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sources import ROOT, Source, faults  # noqa: E402

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 12
# Constructors whose keywords are the user's interface: "module.py:function" -> why.
MANY_PARAMETERS = {
    "trainer.py:__init__": "the keywords of a trainer are its interface",
    "errors.py:__init__": "the fields of an error",
    "optim.py:__init__": "the settings of an optimizer are its interface",
}


def lines_above(limit):
    return lambda source: max(0, len(source.text.splitlines()) - limit)


def long_functions(limit):
    def rule(source):
        lengths = {f.name: f.end_lineno - f.lineno + 1 for f in source.of(ast.FunctionDef, ast.AsyncFunctionDef)}
        return {name: lines for name, lines in lengths.items() if lines > limit}

    return rule


def many_parameters(limit, allowed):
    def rule(source):
        counts = {
            f.name: len(f.args.args) + len(f.args.kwonlyargs) + len(f.args.posonlyargs)
            for f in source.of(ast.FunctionDef, ast.AsyncFunctionDef)
            if f"{source.file.name}:{f.name}" not in allowed
        }
        return {name: count for name, count in counts.items() if count > limit}

    return rule


def printing(source):
    return [node.lineno for node in source.of(ast.Call) if getattr(node.func, "id", "") == "print"]


def test_a_module_fits_in_one_head():
    assert {} == faults(lines_above(MODULE_LINES))


def test_a_function_fits_on_one_screen():
    assert {} == faults(long_functions(FUNCTION_LINES))


def test_a_function_takes_few_parameters():
    assert {} == faults(many_parameters(PARAMETERS, MANY_PARAMETERS))


def test_nothing_prints():
    assert {} == faults(printing)


def test_a_module_says_what_it_is():
    assert {} == faults(lambda source: not ast.get_docstring(source.tree))


def test_each_rule_sees_a_fault():
    assert faults(lines_above(100))
    assert faults(long_functions(30))
    assert faults(many_parameters(PARAMETERS, {}))
    assert printing(Source(ROOT / "scripts/mutations/run.py"))
