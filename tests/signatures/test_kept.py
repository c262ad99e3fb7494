"""Signatures that are kept between commands."""

import json
import os
import subprocess
import sys

import pytest

from forgather.cache_file import with_digest, write_cached
from forgather.signatures import UNKNOWN, Callee, Reader, Unknown

SOURCE = "def build(size: int, ratio=0.5, shape=(1, 2), other=print, *, name: 'str | None' = None, **rest): ...\n"


@pytest.fixture
def project(tmp_path):
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "base.py").write_text("class Base:\n    def __init__(self, size): ...\n")
    (tmp_path / "big.py").write_text("from .base import Base\nclass Big(Base): ...\n")
    return tmp_path


@pytest.fixture
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


def read(project, cache, constructor="model.py:build"):
    return Reader(str(project), cache_dir=str(cache)).read(constructor)


def reads_source(monkeypatch):
    """Counts how often source is read."""
    from forgather.signatures.engine import Engine

    counted = []
    real = Engine.read
    monkeypatch.setattr(Engine, "read", lambda self, *args: counted.append(args) or real(self, *args))
    return counted


def test_what_is_kept_is_what_was_read(project, cache, monkeypatch):
    first = read(project, cache)
    counted = reads_source(monkeypatch)
    again = read(project, cache)
    assert first == again
    assert [] == counted
    defaults = {name: p.default for name, p in again.signatures[0].parameters.items()}
    assert (0.5, (1, 2), UNKNOWN) == tuple(defaults[name].value for name in ("ratio", "shape", "other"))


def test_an_unknown_is_kept_too(project, cache, monkeypatch):
    assert isinstance(read(project, cache, "math:sqrt"), Unknown)
    counted = reads_source(monkeypatch)
    assert isinstance(read(project, cache, "math:sqrt"), Unknown)
    assert [] == counted


def test_a_builtin_is_kept_too(project, cache):
    first = read(project, cache, "len")
    assert first == read(project, cache, "len")
    assert ["obj"] == list(first.signatures[0].parameters)


@pytest.mark.parametrize("constructor", ["model.py:build", "big.py:Big"])
def test_a_changed_file_is_read_again(project, cache, constructor):
    read(project, cache, constructor)
    for name in ("model", "base"):
        file = project / f"{name}.py"
        file.write_text(file.read_text().replace("size", "width"))
    assert "width" in read(project, cache, constructor).signatures[0].parameters


def test_a_module_that_now_comes_first_is_read(project, cache):
    """`from .base import` finds a package before a file of the same name."""
    read(project, cache, "big.py:Big")
    (project / "base").mkdir()
    (project / "base" / "__init__.py").write_text("class Base:\n    def __init__(self, other): ...\n")
    assert ["other"] == list(read(project, cache, "big.py:Big").signatures[0].parameters)


def test_two_projects_with_files_of_one_name_are_kept_apart(project, cache, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "model.py").write_text("def build(depth): ...\n")
    assert read(project, cache) != read(other, cache)
    assert ["depth"] == list(read(other, cache).signatures[0].parameters)


DAMAGE = {
    "cut": lambda content: content[:-20],
    "empty": lambda content: b"",
    "bytes": lambda content: b"\xff\x00" * 50,
    "another form": lambda content: with_digest(json.dumps({"form": -1, "facts": {}}).encode()),
    "no facts": lambda content: with_digest(json.dumps({"form": 1, "facts": {}}).encode()),
    "odd facts": lambda content: with_digest(json.dumps({"form": 1, "facts": {"made_from": 3, "name": []}}).encode()),
    "odd parameters": lambda content: with_digest(
        json.dumps({"form": 1, "facts": {"made_from": [], "signatures": [[["a", 99, None, None]]]}}).encode()
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_read_again_without_a_word(project, cache, damage, capfd):
    expected = read(project, cache)
    for entry in cache.iterdir():
        entry.write_bytes(DAMAGE[damage](entry.read_bytes()))
    assert expected == read(project, cache)
    assert expected == read(project, cache)
    assert ("", "") == tuple(capfd.readouterr())


def test_an_entry_that_others_may_write_is_not_believed(project, cache, monkeypatch):
    read(project, cache)
    for entry in cache.iterdir():
        entry.chmod(0o666)
    counted = reads_source(monkeypatch)
    read(project, cache)
    assert 1 == len(counted)


def test_the_folder_may_go_away_at_any_time(project, cache):
    reader = Reader(str(project), cache_dir=str(cache / "gone"))
    assert isinstance(reader.read("model.py:build"), Callee)


def test_an_entry_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "entry.json" / "taken").mkdir(parents=True)
    write_cached(str(tmp_path / "entry.json"), 1, {"a": 1})
    assert ["entry.json"] == [entry.name for entry in tmp_path.iterdir()]


def test_two_processes_may_fill_one_folder(project, cache):
    code = (
        "import sys; from forgather.signatures import Reader\n"
        "for _ in range(15):\n"
        "    for name in ('model.py:build', 'big.py:Big', 'json:loads'):\n"
        "        Reader(sys.argv[1], cache_dir=sys.argv[2]).read(name)\n"
    )
    command = [sys.executable, "-c", code, str(project), str(cache)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(0, b""), (0, b"")] == [(p.returncode, errors) for p in running for errors in (p.communicate()[1],)]
    assert all(entry.suffix == ".json" for entry in cache.iterdir())
    assert isinstance(read(project, cache), Callee)


def test_answers_of_another_edition_of_the_reader_are_not_taken(project, cache, monkeypatch):
    read(project, cache)
    counted = reads_source(monkeypatch)
    monkeypatch.setattr("forgather.signatures.reader.code_fingerprint", lambda *_: "another")
    assert isinstance(read(project, cache), Callee)
    assert 1 == len(counted)


def test_a_library_is_read_once_for_all_projects_and_an_own_module_in_front_of_it_is_noticed(
    tmp_path, cache, monkeypatch
):
    def read_in(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return Reader(str(folder), system_path=[str(folder)], cache_dir=str(cache)).read("textwrap:wrap")

    first = read_in("one")
    counted = reads_source(monkeypatch)
    assert first == read_in("two")
    assert [] == counted
    # The libraries come first on Python's path, so an own folder decides only what they lack.
    (tmp_path / "two" / "lacking.py").write_text("def wrap(text): ...\n")
    (tmp_path / "one" / "lacking.py").write_text("def wrap(words): ...\n")
    own = [
        Reader(str(tmp_path / name), system_path=[str(tmp_path / name)], cache_dir=str(cache)).read("lacking:wrap")
        for name in ("one", "two", "one")
    ]
    assert [["words"], ["text"], ["words"]] == [list(callee.signatures[0].parameters) for callee in own]
    assert 2 == len(counted)
