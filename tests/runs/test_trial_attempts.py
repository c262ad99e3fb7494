"""Attempts at one trial of a sweep: lists, comparisons and watched runs have the last one, and say what is left out."""

import json
import shutil

import pytest

from forgather import runs
from forgather.cli.main import main
from forgather.run_status import Status
from forgather.runs.compared_run import open_all
from forgather.runs.run_folders import earlier_attempts, find_runs, newest_run
from forgather.runs.watched_runs import Ranking, WatchedRuns
from tests.runs.corpus import make_run


@pytest.fixture
def sweep(tmp_path):
    """A sweep with three attempts at its first trial and one at its second; the newest run of each comes last."""
    folder = tmp_path / "out" / "sweeps" / "a"
    first = [
        make_run(folder / "trials" / "0000", n, status=Status.FINISHED if n == 2 else Status.KILLED) for n in range(3)
    ]
    second = make_run(folder / "trials" / "0001", 3, lr=0.01)
    (folder / "trials.jsonl").write_text("")
    return folder, first, second


def listed(capsys, folder, *words):
    assert 0 == main(["runs", str(folder), "--json", *words])
    printed = capsys.readouterr()
    return [run["folder"] for run in json.loads(printed.out)["runs"]], printed.err


def test_a_list_has_a_row_for_each_trial_and_says_what_is_left_out(sweep, capsys, tmp_path):
    folder, first, second = sweep
    found, said = listed(capsys, tmp_path)
    assert [str(second), str(first[2])] == found
    assert "2 earlier attempts at trials of sweeps left out; --attempts lists every attempt" in said
    found, said = listed(capsys, tmp_path, "--attempts")
    assert ([str(one) for one in (second, *reversed(first))], "") == (found, said)
    assert [2, 4] == [len(runs(tmp_path)), len(runs(tmp_path, attempts=True))]
    # An attempt is still found by its path, such as to remove it.
    assert 0 == main(["runs", "show", str(first[0])])


def test_comparisons_and_watched_runs_have_each_trial_once(sweep):
    folder, first, second = sweep
    last, other = open_all([str(folder)])[0]
    assert [str(first[2]), str(second)] == [last.run.folder, other.run.folder]
    assert list(map(str, first[:2])) == [run.run.folder for run in last.earlier]
    named = [str(one) for one in first[:2]]
    assert named == [run.run.folder for run in open_all(named)[0]], "attempts that are named themselves are compared"
    watched = WatchedRuns([], [str(folder)], ranking=Ranking("eval_loss", is_greater_better=False))
    watched.update()
    assert {str(first[2]), str(second)} == {run.folder for run in watched.summaries()}


def test_only_runs_of_a_trial_of_a_sweep_are_attempts(sweep, tmp_path):
    folder, first, second = sweep
    attempts = {str(one) for one in first[:2]}
    own = [make_run(tmp_path / "out", number) for number in range(2)]
    assert attempts == earlier_attempts(run.folder for run in find_runs(str(tmp_path)))
    assert set() == earlier_attempts(map(str, own))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "trials.jsonl").unlink()
    assert set() == earlier_attempts(run.folder for run in find_runs(str(other)))


def test_runs_of_one_second_are_in_the_order_of_their_numbers():
    names = [f"/o/runs/20260101T000000Z-tiny{more}" for more in ("", "-2", "-10")]
    assert names[2] == newest_run(names)
    assert None is newest_run([])
