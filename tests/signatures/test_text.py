"""Source that is cut into statements, against the whole that Python parses."""

import ast
import functools
import importlib.util
import os
import random
import warnings
from pathlib import Path

import pytest

from forgather.signatures.lazy_ast import Text, body_of
from forgather.signatures.modules import decode

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def sources():
    """A sample of the standard library, and of torch where it is installed; nothing is imported."""
    folders = [Path(os.__file__).parent]
    torch = importlib.util.find_spec("torch")
    folders += [Path(torch.submodule_search_locations[0]) / "nn"] if torch else []
    chance = random.Random(7)
    return [file for folder in folders for file in chance.sample(sorted(folder.rglob("*.py")), 120)]


SHARES = 8


def name(statement):
    return statement.name if isinstance(statement, DEFINITIONS) else None


def is_text(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.JoinedStr)


def compare(block, statements):
    assert {name(s) for s in statements} - {None} == set(block.defined())
    assert [ast.dump(s) for s in statements if not name(s) and not is_text(s)] == [
        ast.dump(s) for s in block.plain() if not is_text(s)
    ]
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            (same,) = [s for s in block.binding(statement.name) if name(s) and s.lineno == statement.lineno]
            compare(body_of(same), statement.body)


@pytest.mark.parametrize("share", range(SHARES))
def test_the_pieces_are_those_of_the_whole(share):
    compared = 0
    for file in sources()[share::SHARES]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                text = decode(file.read_bytes())
                whole = ast.parse(text.text).body
            except (SyntaxError, ValueError):
                continue
        try:
            compare(text.block(), whole)
        except AssertionError as error:
            error.add_note(str(file))
            raise
        compared += 1
    assert compared > 10


TRICKY = {
    "quotes in a comment": "x = 1  # ''' one\ndef f(): ...\ny = 2  # ''' two\n",
    "quotes in a string": "x = \"'''\"\ndef f(): ...\ny = \"'''\"\n",
    "a comment sign in a string": "x = '#' + '''\ndef g(): ...\n'''\ndef f(): ...\n",
    "escaped quotes": 'x = """a\\"""\ndef g(): ...\n"""\ndef f(): ...\n',
    "four quotes": 'x = """a\n""""" ""\ndef f(): ...\n'.replace('""""" ""', '"""'),
    "two strings in a line": "x = ('''a''', '''\ndef g(): ...\n''')\ndef f(): ...\n",
    "a form feed": "x = 1\n\x0cdef f(): ...\n",
    "code behind a backslash": "x = 1 + \\\n2\ndef f(): ...\n",
    "arguments at the margin": "x = dict(\na=1,\nb=2,\n)\ndef f(): ...\n",
    "comments at the margin": "@property\n# why\ndef f(): ...\nif f:\n    x = 1\n# else\nelse:\n    x = 2\n",
    "prose at the margin": 'def f():\n    """\nThis is prose, and not code.\nclass Of: it is prose\n    """\n',
    "one line": "class f: x = 1; y = 2\n",
    "no end": "def f(): ...",
    "several on a line": "x = 1; y = 2; import os; z = 3\n",
    "nested": "class f:\n    '''\n    def no(self): ...\n    '''\n    class g:\n        def h(self): ...\n    x = 1\n",
}


@pytest.mark.parametrize("case", TRICKY)
def test_tricky_text(case):
    compare(Text(TRICKY[case]).block(), ast.parse(TRICKY[case]).body)
