import os
import stat
import subprocess
import sys

import pytest

from forgather.config._jinja import renderer
from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render, render_text


@pytest.fixture
def place(tmp_path):
    """A project with one config, and a cache folder beside it; the memory of compiled code starts empty."""
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "a.yaml").write_text("-- set x = 1\nk: {{ x }}\n")
    renderer.clear_memory()
    return ConfigEnvironment(searchpath=(str(templates),), cache_dir=str(tmp_path / "cache"))


def entries(environment):
    folder = environment.cache_dir
    return sorted(os.path.join(folder, name) for name in os.listdir(folder))


def no_compiler(monkeypatch):
    def refuse(self, source):
        raise AssertionError("compiled again")

    monkeypatch.setattr("forgather.config._jinja.compiler.CompilerEnvironment.code", refuse)


def test_the_first_render_writes_a_private_entry(place):
    assert "k: 1" == render(place, "a.yaml").text
    assert 0o700 == stat.S_IMODE(os.stat(place.cache_dir).st_mode)
    assert [0o600] == [stat.S_IMODE(os.stat(path).st_mode) for path in entries(place)]


def test_a_hit_needs_no_parser(place, monkeypatch):
    first = render(place, "a.yaml")
    renderer.clear_memory()
    no_compiler(monkeypatch)
    assert first == render(place, "a.yaml")


def test_equal_text_under_another_name_is_a_hit_and_keeps_its_own_places(place, monkeypatch):
    render(place, "a.yaml")
    renderer.clear_memory()
    no_compiler(monkeypatch)
    other = render_text(place, "-- set x = 1\nk: {{ x }}\n", name="other", file="<other>")
    assert ("<other>", "other") == (other.source_map.at(1, 1).span.file, other.source_map.at(1, 1).site.template)


def test_no_path_of_the_machine_stands_in_an_entry(place):
    render(place, "a.yaml")
    (path,) = entries(place)
    with open(path, "rb") as stream:
        data = stream.read()
    assert place.searchpath[0].encode() not in data
    assert b"a.yaml" not in data


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: b"something else",
        lambda data: data[:53],
    ],
)
def test_a_damaged_entry_is_ignored_and_replaced(place, damage):
    render(place, "a.yaml")
    (path,) = entries(place)
    with open(path, "rb") as stream:
        data = stream.read()
    with open(path, "wb") as stream:
        stream.write(damage(data))
    renderer.clear_memory()
    assert "k: 1" == render(place, "a.yaml").text
    with open(path, "rb") as stream:
        assert data == stream.read()


def test_an_entry_under_another_key_is_ignored(place):
    render(place, "a.yaml")
    (path,) = entries(place)
    render_text(place, "z: 9\n")
    (other,) = set(entries(place)) - {path}
    os.replace(other, path)
    renderer.clear_memory()
    assert "k: 1" == render(place, "a.yaml").text


def test_an_entry_that_others_can_write_is_ignored(place, monkeypatch):
    render(place, "a.yaml")
    (path,) = entries(place)
    os.chmod(path, 0o666)
    assert renderer._read_entry(path) is None


def test_an_entry_that_is_a_link_is_ignored(place, tmp_path):
    render(place, "a.yaml")
    (path,) = entries(place)
    os.replace(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    assert renderer._read_entry(path) is None


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_an_entry_that_is_no_file_is_ignored(place, make):
    render(place, "a.yaml")
    for path in entries(place):
        os.unlink(path)
        make(path)
    renderer.clear_memory()
    assert "k: 1" == render(place, "a.yaml").text


def test_a_folder_that_others_can_write_is_not_used(place):
    os.mkdir(place.cache_dir)
    os.chmod(place.cache_dir, 0o777)
    assert "k: 1" == render(place, "a.yaml").text
    assert [] == entries(place)


def test_a_folder_that_cannot_be_made_changes_nothing(place, tmp_path):
    (tmp_path / "file").write_text("")
    environment = ConfigEnvironment(searchpath=place.searchpath, cache_dir=str(tmp_path / "file" / "cache"))
    assert "k: 1" == render(environment, "a.yaml").text


def test_a_folder_that_cannot_be_written_changes_nothing(place, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forgather.config._jinja.renderer.tempfile.mkstemp", full)
    assert "k: 1" == render(place, "a.yaml").text


def test_a_changed_template_is_compiled_anew(place):
    render(place, "a.yaml")
    with open(os.path.join(place.searchpath[0], "a.yaml"), "w") as stream:
        stream.write("k: 2\n")
    assert "k: 2" == render(place, "a.yaml").text


def test_without_a_folder_nothing_is_written(place, tmp_path):
    environment = ConfigEnvironment(searchpath=place.searchpath)
    render(environment, "a.yaml")
    assert ["templates"] == sorted(os.listdir(tmp_path))


def test_importing_render_does_not_import_jinja():
    code = "import sys, forgather.config.render; print([m for m in ('jinja2', 'ruamel', 'torch', 'platformdirs') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()
