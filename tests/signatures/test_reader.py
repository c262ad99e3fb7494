"""Constructors of a project and of libraries, read from source."""

import sys

import pytest

from forgather.errors import ResolveError, SyntaxFault
from forgather.signatures import Callee, Reader, Unknown


@pytest.fixture
def project(tmp_path):
    """Writes files into a project folder, and returns a reader of it."""

    def write(searchpath=(), **files):
        for name, text in files.items():
            file = tmp_path / (name.replace("__", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Reader(str(tmp_path))

    return write


def shown(callee):
    assert isinstance(callee, Callee), callee
    return [
        str(s.replace(parameters=[p.replace(annotation=p.empty) for p in s.parameters.values()]))
        for s in callee.signatures
    ]


def names(callee):
    assert isinstance(callee, Callee), callee
    return [list(signature.parameters) for signature in callee.signatures]


def test_a_function_of_a_project_file(project):
    callee = project(model="def build(size, *, depth=2): ...\n").read("model.py:build")
    assert [["size", "depth"]] == names(callee)
    assert ("build", "function") == (callee.name, callee.kind)
    assert ("model.py", 1) == (callee.span.file.rsplit("/")[-1], callee.span.line)
    assert 2 == callee.signatures[0].parameters["depth"].default.value


def test_a_class_through_its_base_in_another_file(project):
    reader = project(
        base="class Base:\n    def __init__(self, size, **rest): super().__init__(**rest)\n",
        model="from .base import Base\nclass Model(Base):\n    def __init__(self, depth, **rest):\n        super().__init__(**rest)\n",
    )
    assert [["depth", "size"]] == names(reader.read("model.py:Model"))


def test_nothing_is_imported(project):
    reader = project(model="raise SystemExit\nclass Model:\n    def __init__(self, size): ...\n")
    before = set(sys.modules)
    assert [["size"]] == names(reader.read("model.py:Model"))
    assert isinstance(reader.read("wave:Wave_read"), Callee)
    assert set() == {name for name in set(sys.modules) - before if not name.startswith("forgather.signatures")}


@pytest.mark.parametrize(
    ("constructor", "code", "message", "hint"),
    [
        ("jsn:loads", "FG320", "no module named 'jsn'", "did you mean 'json'?"),
        ("json.decodr:JSONDecoder", "FG320", "no module named 'json.decodr'", "did you mean 'decoder'?"),
        ("json:lods", "FG321", "'json' has no symbol 'lods'", "did you mean 'loads'?"),
        (
            "json:decoder.JSONDecodr",
            "FG321",
            "'json:decoder' has no symbol 'JSONDecodr'",
            "did you mean 'JSONDecoder'?",
        ),
        ("modl.py:Model", "FG322", "no file 'modl.py'", "did you mean 'model.py'?"),
        ("lenn", "FG324", "no builtin named 'lenn'", "did you mean 'len'?"),
        (
            ".layers:Stack",
            "FG325",
            "the relative module '.layers' has no folders to be looked for in",
            "add submodule_searchpath",
        ),
    ],
)
def test_what_does_not_exist_is_refused_with_the_words_of_the_resolver(project, constructor, code, message, hint):
    with pytest.raises(ResolveError) as caught:
        project(model="class Model: ...\n").read(constructor)
    assert (code, True, True) == (caught.value.code, message in caught.value.message, hint in (caught.value.hint or ""))


def test_a_syntax_error_in_a_project_file_is_a_finding_with_its_line(project):
    with pytest.raises(SyntaxFault, match="model.py is not valid Python") as caught:
        project(model="x = 1\nclass Model(\n    def f(self): ...\n").read("model.py:Model")
    assert ("FG326", 2) == (caught.value.code, caught.value.span.line)


def test_what_source_does_not_tell_is_unknown(project):
    assert isinstance(project().read("math:sqrt"), Unknown)
