import pytest

from forgather.errors import ProjectError
from forgather.project.configs import choose_config, config_files
from forgather.project.metadata_cache import load_meta
from tests.project.workbench import make_project


def project(folder, *names, meta=""):
    files = {f"templates/configs/{name}": "main: 1\n" for name in names}
    return load_meta(str(make_project(folder, files, meta=meta)))


def test_the_only_config_is_meant_without_a_name(tmp_path):
    assert "a.yaml" == choose_config(project(tmp_path, "a.yaml"))


def test_the_default_config_is_meant_without_a_name(tmp_path):
    assert "b.yaml" == choose_config(project(tmp_path, "a.yaml", "b.yaml", meta="default_config: b\n"))


@pytest.mark.parametrize("name", ["exp/a", "exp/a.yaml"])
def test_a_name_is_taken_with_and_without_yaml(tmp_path, name):
    assert "exp/a.yaml" == choose_config(project(tmp_path, "exp/a.yaml", "b.yaml"), name)


def test_several_configs_without_a_default_are_listed(tmp_path):
    with pytest.raises(ProjectError, match="2 configs and no 'default_config': a.yaml, b.yaml") as caught:
        choose_config(project(tmp_path, "a.yaml", "b.yaml"))

    assert ("FG406", "name one, as in -t a.yaml") == (caught.value.code, caught.value.hint)


def test_a_project_without_configs_says_where_they_go(tmp_path):
    with pytest.raises(ProjectError, match="has no config") as caught:
        choose_config(project(tmp_path))

    assert "put one under 'templates/configs', or make one with 'fgcli new config NAME'" == caught.value.hint


def test_a_misspelt_config_gets_a_suggestion(tmp_path):
    with pytest.raises(ProjectError, match="no config 'tinny'") as caught:
        choose_config(project(tmp_path, "tiny.yaml", "gpt2.yaml"), "tinny")

    assert ("FG405", "did you mean 'tiny'?") == (caught.value.code, caught.value.hint)


def test_a_path_to_a_config_is_answered_with_its_name(tmp_path):
    with pytest.raises(ProjectError) as caught:
        choose_config(project(tmp_path, "tiny.yaml"), "templates/configs/tiny.yaml")

    assert "did you mean 'tiny.yaml'?" == caught.value.hint


def test_a_default_config_that_does_not_exist_is_an_error_in_meta(tmp_path):
    with pytest.raises(ProjectError, match="no config 'gone'") as caught:
        choose_config(project(tmp_path, "a.yaml", meta="name: x\ndefault_config: gone\n"))

    assert (str(tmp_path / "meta.yaml"), 2) == (caught.value.span.file, caught.value.span.line)


@pytest.mark.parametrize(
    "name",
    ["../a", "/etc/passwd", "a/../../b", "~/a", "..\\a", "a\0", "file:///a", "..", "../../templates/configs/../../x"],
)
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(ProjectError) as caught:
        choose_config(project(tmp_path, "a.yaml"), name)

    assert "FG407" == caught.value.code


def test_the_first_search_folder_wins_and_hidden_files_are_left_out(tmp_path):
    for name in ("one/configs/a.yaml", "two/configs/a.yaml", "two/configs/b.yaml", "two/configs/.c.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    found = config_files([str(tmp_path / "one"), str(tmp_path / "two")], "configs")

    assert {"a.yaml": str(tmp_path / "one/configs/a.yaml"), "b.yaml": str(tmp_path / "two/configs/b.yaml")} == found
