"""Limits on modules, functions and parameters, and no printing past the console.

Above the first limit a reason is asked for, in the tables below; above the second one there is none.
"""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sources import ROOT, Source, faults  # noqa: E402

MODULE_LINES, MOST_MODULE_LINES = 400, 700
FUNCTION_LINES, MOST_FUNCTION_LINES = 60, 100
PARAMETERS = 12
LONG_MODULES = {
    "forgather/config/_jinja/environment.py": "one class, with every function that a running template calls",
    "forgather/codegen/python/context.py": "the state of one generated function, and each form that a value takes in it",
    "forgather/config/_jinja/template_errors.py": "one table of what Jinja and Python raise, with the nearest names",
    "forgather/config/insight/diff.py": "one walk over two graphs, and which item of a list is which",
    "forgather/ml/anomalies.py": "one detector for each kind of anomaly, and the window that defines it",
    "forgather/ml/data/sources.py": "one function for each kind of file, with its documentation",
    "forgather/ml/distributed/collectives.py": "one function for each kind of exchange of values between hosts",
    "forgather/ml/losses.py": "the loss rules of all strategies: one class and its variants",
    "forgather/ml/strategy/deepspeed.py": "one strategy, from its settings to its state",
    "forgather/ml/strategy/fill_record.py": "one mode, and what each kind of operation does to a formula",
    "forgather/ml/planner/rank_trace.py": "one trace of a rank, part by part, and what each part is given",
    "forgather/ml/strategy/pipeline/schedules.py": "torch's schedules: what each needs, and one runner of them all",
    "forgather/ml/strategy/pipeline/stage.py": "a stage, and the placeholders that it is made with",
    "forgather/ml/strategy/pipeline/strategy.py": "one strategy, from its settings to its state",
    "forgather/ml/strategy/state.py": "one state by names: what is stored, what is refused, and what is restored",
    "forgather/ml/trainer/arguments.py": "one dataclass: each setting of a trainer, with its default and its meaning",
    "forgather/ml/trainer/data_loader.py": "one iterator, with what it checks when a stream is read again",
    "forgather/ml/trainer/resume.py": "one restore, part by part, and the refusals of each part",
    "forgather/ml/trainer/resume_checks.py": "one list of refusals; each is short",
    "forgather/ml/trainer/run.py": "the state of one training, in one class",
    "forgather/project/project.py": "one class: a config, and each of its stages",
    "forgather/redaction.py": "the known secrets, and each form of a text or of data that hides them",
    "forgather/ml/trainer/trainer.py": "one class, whose keywords and documentation are its interface",
    "forgather/rules.py": "one class: the rules about the settings of a call, and each kind of violation",
    "forgather/signatures/name_resolution.py": "one class that resolves names, and its scopes",
}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS = {
    "forgather/ml/trainer/trainer.py:__init__": "the keywords of a trainer are its interface",
    "forgather/ml/strategy/pipeline/strategy.py:__init__": "the settings of a pipeline are its interface",
    "forgather/ml/optim.py:__init__": "the settings of an optimizer are its interface",
}


def functions(source):
    return {f"{source.path}:{f.name}": f for f in source.of(ast.FunctionDef, ast.AsyncFunctionDef)}


def lines_above(limit):
    return lambda source: max(0, len(source.text.splitlines()) - limit)


def long_functions(limit):
    def rule(source):
        lengths = {name: f.end_lineno - f.lineno + 1 for name, f in functions(source).items()}
        return {name: lines for name, lines in lengths.items() if lines > limit}

    return rule


def many_parameters(limit):
    def rule(source):
        counts = {
            name: len(f.args.args) + len(f.args.kwonlyargs) + len(f.args.posonlyargs)
            for name, f in functions(source).items()
        }
        return {name: count for name, count in counts.items() if count > limit}

    return rule


def named(found):
    """Returns the functions of {path: {function: figure}}."""
    return {name for figures in found.values() for name in figures}


def printing(source):
    return [node.lineno for node in source.of(ast.Call) if getattr(node.func, "id", "") == "print"]


def test_a_module_of_more_than_400_lines_has_a_reason():
    assert set(LONG_MODULES) == set(faults(lines_above(MODULE_LINES)))


def test_no_module_has_more_than_700_lines():
    assert {} == faults(lines_above(MOST_MODULE_LINES))


def test_a_function_of_more_than_60_lines_has_a_reason():
    assert set(LONG_FUNCTIONS) == named(faults(long_functions(FUNCTION_LINES)))


def test_no_function_has_more_than_100_lines():
    assert {} == faults(long_functions(MOST_FUNCTION_LINES))


def test_a_function_with_more_than_12_parameters_has_a_reason():
    assert set(MANY_PARAMETERS) == named(faults(many_parameters(PARAMETERS)))


def test_nothing_prints():
    assert {} == faults(printing)


def test_a_module_says_what_it_is():
    assert {} == faults(lambda source: not ast.get_docstring(source.tree))


def test_each_rule_sees_a_fault():
    assert faults(lines_above(100))
    assert faults(long_functions(30))
    assert faults(many_parameters(8))
    assert printing(Source(ROOT / "scripts/mutations/run.py"))
