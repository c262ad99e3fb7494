from forgather.project.locations import library_dir
from forgather.project.path_display import Display


def test_files_are_named_by_the_nearest_root(tmp_path, monkeypatch):
    project, workspace, here = tmp_path / "ws" / "p", tmp_path / "ws", tmp_path / "ws" / "p" / "sub"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    display = Display(str(project), str(workspace))

    assert "x.yaml" == display(str(here / "x.yaml"))
    assert "templates/x.yaml" == display(str(project / "templates/x.yaml"))
    assert "forgather_workspace/x.yaml" == display(str(workspace / "forgather_workspace/x.yaml"))
    assert "/elsewhere/x.yaml" == display("/elsewhere/x.yaml")


def test_library_files_are_marked():
    assert "lib:trainers/trainer.yaml" == Display()(library_dir() + "/trainers/trainer.yaml")


def test_pseudo_names_stay():
    assert "<command line>" == Display()("<command line>")


def test_a_folder_that_only_begins_alike_is_not_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert "/a/project_two/x" == Display("/a/project")("/a/project_two/x")


def test_archive_names_keep_roots_apart(tmp_path):
    display = Display(str(tmp_path / "p"), str(tmp_path), relative_to_cwd=False)

    assert "project/templates/a.yaml" == display.archive_name(str(tmp_path / "p/templates/a.yaml"))
    assert "workspace/a.yaml" == display.archive_name(str(tmp_path / "a.yaml"))
    assert "lib/a.yaml" == display.archive_name(library_dir() + "/a.yaml")
    assert "other/elsewhere/a.yaml" == display.archive_name("/elsewhere/a.yaml")
    assert "other/string" == display.archive_name("<string>")
