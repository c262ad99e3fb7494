import json
import os.path
import sys

import pytest
from documents import graph_of

from forgather.config.builtin_names import SHORT
from forgather.config.materialize import materialize
from forgather.config.resolve import Resolver
from forgather.config.tags import BUILTIN_NAMES, SHORT_NAMES
from forgather.errors import BuildNote, ResolveError


@pytest.fixture
def project(tmp_path):
    """Writes files into a project folder; what it imports is forgotten again."""
    before = set(sys.modules)

    def write(**files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/")
            file = file.with_name(file.name + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        # Libraries stay: what is imported twice has classes twice.
        if any(place.startswith(str(tmp_path)) for place in places_of(sys.modules[name])):
            del sys.modules[name]


def places_of(module):
    return [getattr(module, "__file__", None) or "", *map(str, getattr(module, "__path__", ()))]


def error_of(resolver, constructor, searchpath=()):
    with pytest.raises(ResolveError) as caught:
        resolver.resolve(constructor, searchpath)
    return str(caught.value)


def test_modules_nested_symbols_builtins_and_short_names():
    resolve = Resolver(".").resolve
    assert json.loads is resolve("json:loads")
    assert json.JSONDecoder.decode is resolve("json:JSONDecoder.decode")
    assert os.path.join is resolve("os:path.join")
    assert json.decoder.JSONDecodeError is resolve("json:decoder.JSONDecodeError")
    assert len is resolve("len")
    assert SHORT["items"] is resolve("items")


def test_a_symbol_may_be_a_submodule_that_nobody_imported_yet():
    sys.modules.pop("xml.sax.handler", None)
    assert "ContentHandler" == Resolver(".").resolve("xml:sax.handler.ContentHandler").__name__


def test_the_tag_table_knows_exactly_the_short_names_there_are():
    assert sorted(SHORT) == sorted(SHORT_NAMES)
    assert set(SHORT_NAMES) <= BUILTIN_NAMES


@pytest.mark.parametrize("library", ["json", "random", "torch", "string"])
def test_a_project_file_neither_shadows_a_library_nor_is_shadowed_by_one(project, library):
    folder = project(**{library: "def mine(): return 'project'\n"})
    resolver = Resolver(str(folder))
    loaded = sys.modules.get(library)
    path = list(sys.path)
    assert "project" == resolver.resolve(f"{library}.py:mine")()
    assert loaded is sys.modules.get(library)
    assert path == sys.path


def test_files_of_one_name_in_two_projects_are_two_modules(project):
    folder = project(one__model="name = lambda: 1\n", two__model="name = lambda: 2\n")
    assert 1 == Resolver(str(folder / "one")).resolve("model.py:name")()
    assert 2 == Resolver(str(folder / "two")).resolve("model.py:name")()
    assert 2 == Resolver(str(folder / "one")).resolve("../two/model.py:name")()


def test_a_file_is_imported_once_however_it_is_named(project):
    folder = project(a__model="class Model: pass\n")
    resolver = Resolver(str(folder))
    assert resolver.resolve("a/model.py:Model") is resolver.resolve(f"{folder}/a/../a/model.py:Model")


def test_a_file_imports_its_siblings_relatively_and_libraries_absolutely(project):
    folder = project(
        model="import json\nfrom . import blocks\nfrom .json import mine\nlibrary = lambda: json.dumps([blocks.size, mine])\n",
        blocks="size = 3\n",
        json="mine = 4\n",
    )
    assert "[3, 4]" == Resolver(str(folder)).resolve("model.py:library")()


def test_a_relative_module_is_looked_for_in_the_searchpath_of_the_call(project):
    folder = project(lib__stack="from .part import size\nclass LayerStack: value = size\n", other__part="size = 5\n")
    built = materialize(
        graph_of("a: !singleton:.stack:LayerStack {submodule_searchpath: [lib, other]}\n"), project_dir=str(folder)
    )
    assert 5 == built["a"].value
    assert 5 == Resolver(str(folder), ["lib", "other"]).resolve(".stack:LayerStack").value


def test_a_file_finds_further_modules_in_its_searchpath(project):
    folder = project(a__model="from .part import size\nget = lambda: size\n", b__part="size = 6\n")
    text = "a: !call:a/model.py:get\n  submodule_searchpath: b\n"
    assert {"a": 6} == materialize(graph_of(text), project_dir=str(folder))


def test_what_cannot_be_found_is_named_with_what_is_near(project):
    folder = project(model="class Model: pass\n", lib__stack="", own__broken="import no_such_library\n")
    resolver = Resolver(str(folder))
    assert "[FG320] no module named 'jsom' (did you mean 'json'?)" == error_of(resolver, "jsom:loads")
    assert "[FG320] no module named 'json.decodr' (did you mean 'json.decoder'?)" == error_of(resolver, "json.decodr:x")
    assert "[FG320] no module named 'json.decoder.x' ('json.decoder' is a module, not a package)" == error_of(
        resolver, "json.decoder.x:y"
    )
    assert "[FG321] 'json' has no symbol 'lods' (did you mean 'loads'?)" == error_of(resolver, "json:lods")
    assert "[FG321] 'json:JSONDecoder' has no symbol 'decod' (did you mean 'decode'?)" == error_of(
        resolver, "json:JSONDecoder.decod"
    )
    assert f"[FG322] no file 'modle.py' in {folder} (did you mean 'model.py'?)" == error_of(resolver, "modle.py:Model")
    assert f"[FG322] no file 'x/model.py' in {folder} (did you mean 'model.py'?)" == error_of(
        resolver, "x/model.py:Model"
    )
    assert f"[FG322] no file 'lb/stak.py' in {folder} (did you mean 'lib/stack.py'?)" == error_of(
        resolver, "lb/stak.py:Stack"
    )
    no_folder = f"there is no folder {folder}/lb; did you mean 'lib'?"
    assert f"[FG322] no file 'lb/x.py' in {folder} ({no_folder})" == error_of(resolver, "lb/x.py:Stack")
    assert "[FG321] 'model.py' has no symbol 'Modle' (did you mean 'Model'?)" == error_of(resolver, "model.py:Modle")
    assert "[FG324] no builtin named 'lenn' (did you mean 'len'?)" == error_of(resolver, "lenn")
    assert (
        "[FG325] the relative module '.stack' has no folder to be searched in (add submodule_searchpath: [FOLDER] "
        "to the call)" == error_of(resolver, ".stack:x")
    )
    assert f"[FG320] no module '.stak' in {folder}/lib (did you mean 'stack'?)" == error_of(
        resolver, ".stak:x", ["lib"]
    )
    (folder / "other.py").mkdir()
    message = f"[FG322] no file 'other.py' in {folder} (it is a folder; name a .py file)"
    assert message == error_of(resolver, "other.py:Model")
    assert f"[FG322] no file 'lib/stack' in {folder} (did you mean 'lib/stack.py'?)" == error_of(
        resolver, "lib/stack:x"
    )
    (folder / "notes.txt").write_text("x = 1")
    assert "[FG322] './notes.txt' is not a Python file (name a .py file)" == error_of(resolver, "./notes.txt:x")


def test_an_import_that_fails_inside_a_module_keeps_its_exception_and_gets_a_note(project):
    folder = project(missing="import no_such_library\n", broken="raise OSError('disk')\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library") as caught:
        materialize(graph_of("a:\n  b: !call:missing.py:x\n"), project_dir=str(folder))
    assert not isinstance(caught.value, ResolveError)
    assert ["while importing missing.py:x at a.b (/project/t.yaml:2)"] == caught.value.__notes__
    with pytest.raises(OSError, match="disk") as failed:
        materialize(graph_of("a: !call:broken.py:x\n"), project_dir=str(folder))
    assert isinstance(failed.value.__notes__[0], BuildNote)
