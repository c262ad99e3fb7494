import pytest

from forgather.errors import ProjectError
from forgather.project.workspace import find_project, find_projects, find_workspace
from tests.project.workbench import make_project


def test_the_nearest_project_upward_is_found(tmp_path, monkeypatch):
    make_project(tmp_path / "outer")
    inner = make_project(tmp_path / "outer" / "inner")
    (inner / "deep" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(inner / "deep" / "deeper")

    assert str(inner) == find_project()


def test_outside_any_project_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ProjectError, match="no 'meta.yaml' in") as caught:
        find_project()

    assert "FG400" == caught.value.code


def test_a_folder_without_meta_names_the_projects_in_it(tmp_path):
    make_project(tmp_path / "one")
    make_project(tmp_path / "two")

    with pytest.raises(ProjectError, match="has no 'meta.yaml'") as caught:
        find_project(str(tmp_path))

    assert ("FG401", "projects there: one, two") == (caught.value.code, caught.value.hint)


def test_a_folder_that_does_not_exist_names_its_neighbors(tmp_path):
    make_project(tmp_path / "tiny_llama")

    with pytest.raises(ProjectError, match="no such folder") as caught:
        find_project(str(tmp_path / "tiny_lama"))

    assert "projects there: tiny_llama" == caught.value.hint


def test_a_file_is_not_a_project(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ProjectError, match="it is not a folder"):
        find_project(str(tmp_path / "file"))


def test_the_nearest_workspace_holds_the_folder(tmp_path):
    (tmp_path / "forgather_workspace").mkdir()
    project = make_project(tmp_path / "group" / "project")

    assert str(tmp_path) == find_workspace(str(project))
    assert find_workspace(str(tmp_path.parent)) is None


def test_projects_are_found_below_a_folder_in_order_without_hidden_and_built_ones(tmp_path):
    for name in ("b", "a", "a/nested", ".hidden", "node_modules/x", "output_models/y"):
        make_project(tmp_path / name)

    assert [str(tmp_path / name) for name in ("a", "a/nested", "b")] == list(find_projects(str(tmp_path)))


def test_links_are_not_followed(tmp_path):
    make_project(tmp_path / "real" / "project")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)

    assert [str(tmp_path / "real" / "project")] == list(find_projects(str(tmp_path / "real")))
