"""Progress bars of libraries: none in a log, and none of several processes but the main one."""

import io
import os

import pytest

from forgather.cli.main import without_library_bars
from tests.project.workbench import fgcli, make_project

NAME = "HF_DATASETS_DISABLE_PROGRESS_BARS"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "speaks", "is_quiet"),
    [(Terminal(), True, False), (Terminal(), False, True), (io.StringIO(), True, True)],
)
def test_bars_are_drawn_on_a_terminal_by_one_process(monkeypatch, stream, speaks, is_quiet):
    monkeypatch.setattr("sys.stderr", stream)
    with without_library_bars(speaks=speaks):
        assert is_quiet is (NAME in os.environ)
    assert NAME not in os.environ


def test_a_choice_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(NAME, "0")
    with without_library_bars(speaks=False):
        assert "0" == os.environ[NAME]


def test_a_data_set_that_is_mapped_leaves_no_bar_in_a_log(tmp_path):
    code = "from datasets import Dataset\ndef rows():\n    return len(Dataset.from_list([{'a': 1}]).map(lambda row: row))\n"
    folder = make_project(
        tmp_path / "bench", {"toy.py": code, "templates/configs/a.yaml": "main: !singleton:toy.py:rows []\n"}
    )
    done = fgcli("-t", "a", "construct", "main", cwd=folder)

    assert ("1\n", "") == (done.stdout, done.stderr)
