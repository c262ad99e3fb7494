"""What meta.yaml says is kept, and never longer than it holds."""

import pytest

from forgather.project import metadata_file
from forgather.project.metadata_cache import load_meta
from tests.project.workbench import make_project


@pytest.fixture
def reads(monkeypatch):
    """Folders whose meta.yaml was really read."""
    folders = []
    read = metadata_file.read_meta
    monkeypatch.setattr(metadata_file, "read_meta", lambda folder: (folders.append(folder), read(folder))[1])
    return folders


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "bench" / "src").mkdir(parents=True)
    return make_project(tmp_path / "bench", meta="name: Bench\ndefault_config: plain\nsystem_path: src\n")


def test_the_second_reading_gives_the_same_without_reading(bench, reads):
    first = load_meta(str(bench))

    assert first == load_meta(str(bench))
    assert [str(bench)] == reads


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "meta.yaml").write_text("name: Other\n"),
        lambda folder: (folder.parent / "forgather_workspace").mkdir(),
        lambda folder: (folder / "templates").rename(folder / "gone"),
        lambda folder: (folder / "src").rename(folder / "gone"),
    ],
    ids=["meta.yaml", "a workspace", "a search folder", "a folder of modules"],
)
def test_a_change_is_noticed(bench, reads, change):
    load_meta(str(bench))
    change(bench)
    load_meta(str(bench))

    assert 2 == len(reads)


def test_what_other_code_has_kept_is_read_again(bench, reads, monkeypatch):
    load_meta(str(bench))
    monkeypatch.setattr("forgather.project.fact_cache.code_fingerprint", lambda *_: "another")
    load_meta(str(bench))

    assert 2 == len(reads)


def test_a_parent_template_that_appears_nearer_is_noticed(tmp_path, private_folders):
    folder = private_folders / "config" / "forgather" / "templates"
    folder.mkdir(parents=True)
    (folder / "defaults.yaml").write_text("name: of the user\n")
    bench = make_project(tmp_path / "bench", meta="-- include 'defaults.yaml'\n")
    assert "of the user" == load_meta(str(bench)).name
    (bench / "defaults.yaml").write_text("name: of the project\n")

    assert "of the project" == load_meta(str(bench)).name


def test_a_default_search_folder_that_appears_is_noticed(tmp_path):
    bench = make_project(tmp_path / "bench", {})
    assert () == load_meta(str(bench)).searchdir
    (bench / "templates").mkdir()

    assert (str(bench / "templates"),) == load_meta(str(bench)).searchdir


def test_an_environment_variable_is_noticed(tmp_path, monkeypatch):
    bench = make_project(tmp_path / "bench", meta="name: {{ env('BENCH_DIR', 'unset') }}\n")
    assert "unset" == load_meta(str(bench)).name
    monkeypatch.setenv("BENCH_DIR", "set")

    assert "set" == load_meta(str(bench)).name


@pytest.mark.parametrize("text", ["name: {{ getcwd() }}\n", "name: at {{ isotime() }}\n", "searchdir: nowhere\n"])
def test_what_may_change_by_itself_and_what_warns_is_read_every_time(tmp_path, reads, text):
    bench = make_project(tmp_path / "bench", meta=text)
    load_meta(str(bench))
    load_meta(str(bench))

    assert 2 == len(reads)


def test_two_projects_are_kept_apart(tmp_path):
    one, two = (make_project(tmp_path / name, meta=f"name: {name}\n") for name in ("one", "two"))
    load_meta(str(one))
    load_meta(str(two))

    assert ["one", "two"] == [load_meta(str(one)).name, load_meta(str(two)).name]
