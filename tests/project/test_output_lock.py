"""One run at a time in an output folder."""

import json
import os

import pytest

from forgather.cli.main import main
from forgather.errors import ProjectError
from forgather.project.output_lock import output_folder_lock
from tests.project.workbench import make_project

CONFIG = "meta: {output_dir: out}\nmain: !partial:builtins:print [ran]\n"


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with output_folder_lock(str(tmp_path)), pytest.raises(ProjectError, match="another run is writing") as caught:
        with output_folder_lock(str(tmp_path)):
            pass
    assert "FG420" == caught.value.code


def test_the_folder_is_free_again_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError), output_folder_lock(str(tmp_path)):
        raise RuntimeError("out of memory")
    with output_folder_lock(str(tmp_path)):
        assert os.path.isdir(tmp_path / "runs")


def test_a_refused_train_leaves_no_run_folder(tmp_path, capsys):
    make_project(tmp_path, {"templates/configs/a.yaml": CONFIG})
    with output_folder_lock(str(tmp_path / "out")):
        assert 1 == main(["-p", str(tmp_path), "-t", "a", "train"])
    assert "FG420" in capsys.readouterr().err
    assert [".lock"] == os.listdir(tmp_path / "out" / "runs")

    assert 0 == main(["-p", str(tmp_path), "-t", "a", "train"])
    assert "ran" in capsys.readouterr().out


def test_train_as_json_prints_json_alone(tmp_path, capsys):
    make_project(tmp_path, {"templates/configs/a.yaml": CONFIG})
    assert 0 == main(["-p", str(tmp_path), "-t", "a", "train", "--json"])
    printed = capsys.readouterr()
    assert 0 == json.loads(printed.out)["status"]
    assert "ran" in printed.err
