"""The mutants that the tests are to notice: each can still be applied, and the command tells what became of it."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutations" / "run.py"


def loaded():
    spec = importlib.util.spec_from_file_location("mutations", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = loaded()
MUTANTS = mutations.read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_applies_to_one_place_and_its_tests_are_there(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text != mutant.applied(text)
    assert mutant.tests and [] == [test for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()]
    assert mutant.why


def test_every_mutant_has_its_own_name():
    assert len(MUTANTS) == len({mutant.id for mutant in MUTANTS})


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    (tmp_path / "product.py").write_text("def double(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n")
    test = "from product import double\n\n\ndef test_double():\n    assert 6 == double(3)\n"
    (tmp_path / "test_product.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return tmp_path


def mutant(old, new, tests=("test_product.py",)):
    return mutations.Mutant("one", "product.py", old, new, "because", tests)


def test_a_mutant_is_killed_by_a_test_that_fails_with_it_alone(tree):
    before = (tree / "product.py").read_text()
    found = mutations.judge(mutant("x * 2", "x * 3"), tree)
    assert (True, "test_product.py::test_double") == (found.killed, found.by)
    assert before == (tree / "product.py").read_text()


def test_a_mutant_that_no_test_notices_survives(tree):
    assert not mutations.judge(mutant("x / 2", "x / 3"), tree).killed


def test_a_test_that_fails_anyhow_kills_nothing(tree):
    (tree / "test_product.py").write_text("def test_false():\n    assert False\n")
    with pytest.raises(RuntimeError, match="also fails without the mutant"):
        mutations.judge(mutant("x * 2", "x * 3"), tree)


@pytest.mark.parametrize(("old", "new", "what"), [("return", "raise", "occurs 2 times"), ("x * 5", "", "occurs 0")])
def test_a_text_that_is_not_there_once_is_refused(tree, old, new, what):
    with pytest.raises(ValueError, match=what):
        mutations.judge(mutant(old, new), tree)
