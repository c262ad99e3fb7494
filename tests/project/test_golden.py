"""Goldens: the same on every machine and every day, and compared by what they mean."""

import os

import pytest

from forgather.errors import ProjectError
from forgather.project.golden import (
    GoldenCheck,
    GoldenState,
    compare_goldens,
    golden_text,
    machine_independent_graph,
    machine_independent_project,
    read_golden,
    update_golden,
)
from forgather.project.metadata_file import read_meta
from forgather.project.project import Project
from tests.project.workbench import make_project

MOVING = """\
meta: {config_name: {{ hostname }}, output_dir: {{ project_dir }}/out}
times: [{{ isotime() | toyaml }}, {{ utcfiletime() | toyaml }}, {{ now().year }}]
places:
  - {{ getcwd() }}
  - {{ user_home_dir() }}
  - {{ user_cache_dir('x') }}
  - {{ abspath('data') }}
  - {{ abspath(project_dir) }}
  - {{ relpath(project_dir, workspace_root) | toyaml }}
  - {{ joinpath(workspace_root, 'shared') }}
host: {{ uname.release | toyaml }}
env: [{{ env('SOME_ROOT', 3) }}, {{ env('SOME_DIR') }}]
versions: {{ versions.torch }}
new: {{ versions.torch >= '2.4' }}
main: 1
"""


def project(folder, files=None, workspace=False):
    if workspace:
        (folder / "forgather_workspace").mkdir(parents=True)
        folder = folder / "inside"
    make_project(folder, files or {"templates/configs/a.yaml": MOVING, "templates/configs/b.yaml": "main: 1\n"})
    return read_meta(str(folder))


def text(meta, config="a.yaml"):
    return golden_text(machine_independent_graph(machine_independent_project(meta, config)))


@pytest.mark.parametrize("workspace", [False, True])
def test_a_golden_holds_nothing_of_the_machine_and_the_day(tmp_path, monkeypatch, workspace):
    one = text(project(tmp_path / "one", workspace=workspace))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("SOME_ROOT", "7")
    monkeypatch.setenv("HOME", "/other")
    two = text(project(tmp_path / "two", workspace=workspace))

    assert one == two
    assert str(tmp_path) not in one
    assert os.uname().nodename not in one


def test_paths_read_as_what_they_are(tmp_path):
    held = text(project(tmp_path, workspace=True)).replace('"', "")

    assert "output_dir: {project}/out" in held
    for line in (
        "{cwd}",
        "{home}",
        "{home}/user_cache_dir/x",
        "{cwd}/data",
        "{project}",
        "inside",
        "{workspace}/shared",
    ):
        assert f"\n  - {line}\n" in held
    assert "new: true" in held


def test_a_golden_is_written_once_and_is_then_as_before(tmp_path):
    meta = project(tmp_path)

    assert [GoldenState.MISSING, GoldenState.MISSING] == [item.state for item in compare_goldens(meta)]
    assert [True, True] == [update_golden(item) for item in compare_goldens(meta)]
    assert [GoldenState.SAME, GoldenState.SAME] == [item.state for item in compare_goldens(meta)]
    name = compare_goldens(meta)[0].config
    assert [name] == [item.config for item in compare_goldens(meta, [name, name.removesuffix(".yaml")])]
    assert [False, False] == [update_golden(item) for item in compare_goldens(meta)]


def test_the_order_of_keys_and_a_comment_are_not_a_difference(tmp_path):
    meta = project(tmp_path, {"templates/configs/a.yaml": "main: {x: 1, y: 2}\n"})
    update_golden(compare_goldens(meta)[0])
    (tmp_path / "templates/configs/a.yaml").write_text("# moved\nmain:\n  y: 2\n  x: 1\n")

    assert [GoldenState.SAME] == [item.state for item in compare_goldens(meta)]


def test_a_difference_has_the_line_of_the_golden_and_that_of_the_template(tmp_path):
    meta = project(tmp_path)
    for item in compare_goldens(meta):
        update_golden(item)
    (tmp_path / "templates/configs/b.yaml").write_text("\nmain: 2\n")

    (found,) = compare_goldens(meta, ["b"])[0].differences

    assert (2, 2) == (found.old.origin.span.line, found.new.origin.span.line)
    assert str(tmp_path / "goldens/b.yaml") == found.old.origin.span.file


def test_a_golden_without_a_config_is_reported_and_removed_and_a_file_of_someone_else_is_left(tmp_path):
    meta = project(tmp_path, {"templates/configs/exp/a.yaml": "main: 1\n"})
    update_golden(compare_goldens(meta)[0])
    (tmp_path / "templates/configs/exp/a.yaml").rename(tmp_path / "templates/configs/b.yaml")
    (tmp_path / "goldens/notes.yaml").write_text("mine: 1\n")

    assert [("b.yaml", GoldenState.MISSING), ("exp/a.yaml", GoldenState.LOST)] == [
        (i.config, i.state) for i in compare_goldens(meta)
    ]
    for item in compare_goldens(meta):
        update_golden(item)
    assert ["b.yaml", "notes.yaml"] == sorted(os.listdir(tmp_path / "goldens"))


def test_a_file_of_someone_else_is_not_written_over(tmp_path):
    meta = project(tmp_path, {"templates/configs/a.yaml": "main: 1\n", "goldens/a.yaml": "mine: 1\n"})

    (item,) = compare_goldens(meta)

    assert (GoldenState.BROKEN, "FG432") == (item.state, item.error.code)
    with pytest.raises(ProjectError, match=r"\[FG431\] .*is not a golden, and is not overwritten"):
        update_golden(item)


def test_a_damaged_golden_is_reported_by_its_line_and_written_again(tmp_path):
    meta = project(tmp_path, {"templates/configs/a.yaml": "main: 1\nb: 2\n"})
    update_golden(compare_goldens(meta)[0])
    file = tmp_path / "goldens/a.yaml"
    file.write_text(file.read_text().replace("b: 2", "<<: ours"))

    (item,) = compare_goldens(meta)

    assert (GoldenState.BROKEN, "FG432", 3) == (item.state, item.error.code, item.error.span.line)
    assert update_golden(item)
    assert [GoldenState.SAME] == [item.state for item in compare_goldens(meta)]


@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "not text", "folder", "device"])
def test_what_cannot_be_read_is_reported_together_and_not_written_over(tmp_path, kind):
    meta = project(tmp_path)
    file = tmp_path / "goldens/a.yaml"
    file.parent.mkdir()
    make = {
        "pipe": lambda: os.mkfifo(file),
        "link to nothing": lambda: file.symlink_to(tmp_path / "nothing"),
        "not text": lambda: file.write_bytes(b"\xff\xfe"),
        "folder": file.mkdir,
        "device": lambda: file.symlink_to("/dev/zero"),
    }
    make[kind]()

    (item,) = compare_goldens(meta, ["a"])
    assert (GoldenState.BROKEN, "FG432") == (item.state, item.error.code)
    assert item.error.hint.startswith("remove it")
    with pytest.raises(ProjectError, match="FG431"):
        update_golden(item)
    assert not (tmp_path / "nothing").exists()


def test_a_golden_that_cannot_be_removed_is_an_error(tmp_path):
    lost = GoldenCheck(config="c.yaml", file=str(tmp_path), state=GoldenState.LOST)
    with pytest.raises(ProjectError, match=r"\[FG431\] the golden .* cannot be written: Is a directory"):
        update_golden(lost)


def test_a_golden_that_cannot_be_written_is_an_error(tmp_path):
    meta = project(tmp_path, {"templates/configs/a.yaml": "main: 1\n", "goldens": "a file\n"})

    with pytest.raises(ProjectError, match=r"\[FG431\] the golden .* cannot be written"):
        update_golden(compare_goldens(meta)[0])


def test_the_real_graph_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_DIR", "w")
    meta = project(tmp_path)
    update_golden(compare_goldens(meta, ["a"])[0])

    held = read_golden(str(tmp_path / "goldens/a.yaml")).targets["meta"].value.entries[1].value
    real = Project("a", tmp_path).graph.targets["meta"].value.entries[1].value
    assert ("{project}/out", f"{tmp_path}/out") == (held.value, real.value)
