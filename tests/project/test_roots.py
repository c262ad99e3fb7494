"""Configs and templates come from the declared folders alone (guarantee S5), whatever a project is made of."""

import os

import pytest

from forgather.errors import ForgatherError
from forgather.project.project import Project
from tests.project.workbench import make_project

SECRET = "main: secret words\n"


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "secret.yaml").write_text(SECRET)
    return make_project(tmp_path / "ws" / "bench", {"templates/configs/a.yaml": "main: 1\n"})


@pytest.mark.parametrize(
    "name",
    [
        "../../../../secret",
        "../../../../secret.yaml",
        "configs/../../../../secret.yaml",
        "/etc/passwd",
        "~/secret.yaml",
        "file:///etc/passwd",
        "..\\..\\secret.yaml",
        "secret.yaml\0",
        "./../../../../secret.yaml",
        "%2e%2e/secret.yaml",
    ],
)
@pytest.mark.parametrize("statement", ["-- extends '{0}'", "-- include '{0}'", "-- import '{0}' as x"])
def test_a_template_outside_the_search_path_is_never_read(bench, name, statement):
    config = bench / "templates/configs/b.yaml"
    config.write_text(statement.format(name) + "\nmain: 1\n")

    with pytest.raises(ForgatherError) as caught:
        Project("b", bench).rendered  # noqa: B018

    assert str(config) == caught.value.span.file
    assert "secret words" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="links")
@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_that_leads_out_is_refused(bench, link):
    if link == "file":
        (bench / "templates/configs/b.yaml").symlink_to(bench.parents[1] / "secret.yaml")
        name = "b"
    else:
        (bench / "templates/out").symlink_to(bench.parents[1])
        (bench / "templates/configs/c.yaml").write_text("-- include 'out/secret.yaml'\n")
        name = "c"

    with pytest.raises(ForgatherError) as caught:
        Project(name, bench)("main")

    assert "secret words" not in str(caught.value)


def test_a_workspace_shares_its_own_folder_and_nothing_next_to_it(bench):
    (bench.parent / "forgather_workspace").mkdir()
    (bench.parent / "forgather_workspace/shared.yaml").write_text("shared: 1\n")
    (bench.parent / "beside.yaml").write_text(SECRET)
    config = bench / "templates/configs/b.yaml"
    config.write_text("-- include 'shared.yaml'\nmain: 1\n")
    assert 1 == Project("b", bench)("shared")

    for name in ("beside.yaml", "../beside.yaml", "forgather_workspace/shared.yaml"):
        config.write_text(f"-- include '{name}'\nmain: 1\n")
        with pytest.raises(ForgatherError):
            Project("b", bench)()


def test_meta_reads_nothing_outside_either(bench):
    (bench / "meta.yaml").write_text("-- include '../../secret.yaml'\n")

    with pytest.raises(ForgatherError):
        Project("a", bench)
