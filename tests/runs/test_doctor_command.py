"""`fgcli doctor`: what it prints, its exit status, and which checks run."""

import json

import pytest

from forgather.cli.doctor_output import as_data, conclusion, line_of
from forgather.cli.main import main
from forgather.doctor.result import not_checked, note, ok, wrong
from forgather.doctor.survey import GROUPS, Wanted, survey

CHEAP = "variables,system,folders,network,libraries"


def test_a_fault_makes_the_exit_status_1_and_has_its_fix(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    assert 1 == main(["doctor", "--only", "variables"])
    shown = capsys.readouterr().out
    assert "wrong        NCCL variables      no library reads NCCL_TIMEOUT\n" in shown
    assert "fix: NCCL_TIMEOUT: the timeout of a run is timeout_seconds of distributed_env" in shown
    assert shown.endswith("\n1 fault in 1 check\n")


def test_a_sound_machine_needs_no_project(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert 0 == main(["doctor", "--only", CHEAP, "--json"])
    found = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in found["checks"]]
    assert found["ok"] and {"NCCL variables", "memory", "run folder", "clock", "hostname", "libraries"} <= set(names)
    speed = next(check for check in found["checks"] if check["name"] == "disk speed")
    assert 0 < speed["values"]["bytes_per_second"]
    assert [] == list(tmp_path.iterdir())


def test_a_run_folder_that_cannot_be_used_is_a_fault(capsys):
    assert 1 == main(["doctor", "--only", "folders", "--folder", "/proc/1"])
    assert "/proc/1 cannot be written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2", "--node-rank", "0"], "[FG462]"),
        (["--nodes", "1:4", "--master-addr", "h"], "[FG462]"),
        (["--nodes", "2", "--node-rank", "5", "--master-addr", "h"], "[FG462]"),
    ],
)
def test_machines_that_cannot_meet_are_refused(words, said, capsys):
    assert 1 == main(["doctor", *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-5", "0", "1e400", "x"])
def test_a_time_that_is_no_number_above_0_is_refused(seconds, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--only", "variables", f"--timeout={seconds}"])
    assert f"'{seconds}' is not a number of seconds above 0" in capsys.readouterr().err


def test_a_group_that_does_not_exist_is_refused_with_the_near_one(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--only", "netwrk"])
    assert "'netwrk' is no group of checks: did you mean 'network'?" in capsys.readouterr().err


def test_every_group_runs_in_its_order(tmp_path):
    assert {"libraries", "devices", "all-reduce", "machines"} <= set(GROUPS)
    names = [result.name for result in survey(Wanted(folder=str(tmp_path), groups=("system", "libraries")))]
    assert "libraries" == names[0] and "memory" in names


def test_what_was_not_checked_is_counted_and_is_no_success():
    results = [ok("a", "x"), note("b", "y"), not_checked("c", "no GPU"), wrong("d", "z", "mend it")]
    assert "\n1 fault in 4 checks, 1 not checked" == conclusion(results)
    assert not as_data(results)["ok"] and as_data(results[:3])["ok"]
    assert "not checked  c                   no GPU" == line_of(results[2])
    assert ["ok", "note", "not checked", "wrong"] == [check["state"] for check in as_data(results)["checks"]]
