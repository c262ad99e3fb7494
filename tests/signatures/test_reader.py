"""Constructors of a project and of libraries, read from source."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from forgather.errors import ResolveError, SyntaxFault
from forgather.signatures import Callee, Reader, Unknown
from tests.patience import patience


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
        ("json.decodr:JSONDecoder", "FG320", "no module named 'json.decodr'", "did you mean 'json.decoder'?"),
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
            "the relative module '.layers' has no folder to be searched in",
            "add submodule_searchpath",
        ),
    ],
)
def test_what_does_not_exist_is_refused_with_the_words_of_the_resolver(project, constructor, code, message, hint):
    with pytest.raises(ResolveError) as caught:
        project(model="class Model: ...\n").read(constructor)
    assert (code, True, True) == (caught.value.code, message in caught.value.message, hint in (caught.value.hint or ""))


def test_what_is_not_there_is_looked_for_once(project):
    reader = project()
    told = []
    for _ in range(2):
        with pytest.raises(ResolveError) as caught:
            reader.read("jsn:loads")
        told.append(caught.value)
    first, second = told
    assert first is not second
    assert (first.code, first.message, first.hint) == (second.code, second.message, second.hint)
    begun = time.perf_counter()
    for _ in range(5_000):
        with pytest.raises(ResolveError):
            reader.read("jsn:loads")
    assert time.perf_counter() - begun < patience(2)


def test_what_source_does_not_tell_is_unknown(project):
    assert isinstance(project().read("math:sqrt"), Unknown)


MISTAKEN = {
    "syntax": (b"x = 1\nclass Model(\n    def f(self): ...\n", 2),
    "null": (b"x = 1\n\0\nclass Model: ...\n", 2),
    "not text": (b"x = 1\ny = '\xff\xfe'\nclass Model: ...\n", 2),
    "encoding": (b"# -*- coding: nonsense -*-\nclass Model: ...\n", 1),
    "tabs": (b"class Model:\n\tdef f(self):\n        pass\n", 3),
    "parentheses": (b"x = " + b"(" * 5000 + b")" * 5000 + b"\nclass Model: ...\n", 1),
}


@pytest.mark.parametrize("name", MISTAKEN)
@pytest.mark.parametrize("through", [False, True])
def test_a_project_file_that_python_cannot_import(tmp_path, name, through):
    content, line = MISTAKEN[name]
    (tmp_path / "model.py").write_bytes(content)
    (tmp_path / "through.py").write_text("from .model import Model\n")
    with pytest.raises(SyntaxFault, match="model.py is not valid Python") as caught:
        Reader(str(tmp_path)).read("through.py:Model" if through else "model.py:Model")
    assert ("FG326", line) == (caught.value.code, caught.value.span.line)
    assert str(tmp_path / "model.py") == caught.value.span.file


READABLE = {
    "byte order mark": b"\xef\xbb\xbfclass Model:\n    def __init__(self, size): ...\n",
    "line ends": b"class Model:\r\n    def __init__(self, size): ...\r\n",
    "encoding": "# -*- coding: latin-1 -*-\nx = 'é'\nclass Model:\n    def __init__(self, size): ...\n".encode(
        "latin-1"
    ),
    "separators": "class Model:\n    x = '\u2028'\n    def __init__(self, size): ...\n".encode(),
}


@pytest.mark.parametrize("name", READABLE)
def test_text_of_any_kind(tmp_path, name):
    (tmp_path / "model.py").write_bytes(READABLE[name])
    assert [["size"]] == names(Reader(str(tmp_path)).read("model.py:Model"))


TOO_MUCH = {
    "large": "x = 1\n" * 1_500_000,
    "deep": "x = " + "-" * 200_000 + "1\nclass Model: ...\n",
    "long": "Model = x" + ".y" * 3000 + "\n",
    "many names": "Model = B0\n" + "".join(f"B{i} = B{i + 1}\n" for i in range(3000)),
    "many bases": "".join(f"class B{i}(B{i + 1}): ...\n" for i in range(1500)) + "Model = B0\n",
    "itself": "from .model import Model\n",
    "circle": "class Model(Other): ...\nclass Other(Model): ...\n",
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much_is_unknown(project, name):
    answer = project(model=TOO_MUCH[name]).read("model.py:Model")
    assert isinstance(answer, Unknown)
    assert answer.reason


def test_a_mistake_in_a_file_next_to_the_project_is_found(project, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "model.py").write_text("class Model(\n")
    with pytest.raises(SyntaxFault, match="model.py is not valid Python"):
        project().read(f"{other}/model.py:Model")


def test_a_mistake_in_a_library_is_unknown(tmp_path, monkeypatch):
    (tmp_path / "faulty_library.py").write_text("class Model(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reader = Reader(str(tmp_path / "project"))
    assert isinstance(reader.read("faulty_library:Model"), Unknown)


def test_a_folder_of_the_system_path_is_the_users(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_models.py").write_text("class Model:\n    def __init__(self, size): ...\n")
    reader = Reader(str(tmp_path), system_path=[str(tmp_path / "code")])
    assert [["size"]] == names(reader.read("own_models:Model"))
    with pytest.raises(ResolveError, match="no module named 'own_models'"):
        Reader(str(tmp_path)).read("own_models:Model")


def test_relative_modules_and_files_with_further_folders(project, tmp_path):
    reader = project(
        layers__stack="class Stack:\n    def __init__(self, depth): ...\n", model="from .stack import Stack\n"
    )
    assert [["depth"]] == names(reader.read(".stack:Stack", ["layers"]))
    assert [["depth"]] == names(reader.read("model.py:Stack", ["layers"]))
    with pytest.raises(ResolveError, match=r"no module '.stak'.*did you mean 'stack'"):
        reader.read(".stak:Stack", ["layers"])


def test_a_folder_without_init_is_a_package(tmp_path, monkeypatch):
    (tmp_path / "loose" / "inner").mkdir(parents=True)
    (tmp_path / "loose" / "inner" / "mod.py").write_text("def f(a): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [["a"]] == names(Reader(str(tmp_path / "x")).read("loose.inner.mod:f"))
    assert [["a"]] == names(Reader(str(tmp_path / "x")).read("loose:inner.mod.f"))


def test_builtins_and_short_names(project):
    reader = project()
    assert [["obj"]] == names(reader.read("len"))
    assert [["function", "args", "kwargs"]] == names(reader.read("call"))
    assert [["container", "key"]] == names(reader.read("getitem"))
    assert isinstance(reader.read("int"), Unknown)
    assert "function" == reader.read("len").kind


def test_reading_imports_compiles_and_runs_nothing(tmp_path):
    """The files of libraries and of the project are parsed, under no name of theirs; no other event of import is seen."""
    (tmp_path / "model.py").write_text(
        "import torch\nraise SystemExit\nclass Model(torch.nn.Module):\n    def __init__(self, size): ...\n"
    )
    code = textwrap.dedent("""
        import sys
        from forgather.signatures import Reader
        from forgather.signatures.engine import Engine
        import encodings.utf_8_sig, forgather.signatures.reader, inspect
        seen, before = [], set(sys.modules)
        def hook(event, args):
            if event in ("import", "exec") or (event == "compile" and not str(args[1]).startswith("<")):
                seen.append((event, str(args[0])[:80]))
            elif event.startswith(("socket", "subprocess", "os.")) and event not in ("os.listdir", "os.scandir"):
                seen.append((event, str(args)[:80]))
        sys.addaudithook(hook)
        reader = Reader(sys.argv[1])
        for name in sys.argv[2:]:
            reader.read(name)
        print(seen, sorted(set(sys.modules) - before))
        """)
    read = [
        "model.py:Model",
        "torch.optim:AdamW",
        "transformers:LlamaConfig",
        "forgather.ml:Trainer",
        "json:loads",
        "len",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path), *read]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ("[] []\n", "", 0) == (done.stdout, done.stderr, done.returncode)
