"""The journal of a sweep: every cut of its file gives a sweep that goes on, and attempts are judged by what they did."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from forgather.errors import ProjectError
from forgather.interventions import Intervention, record
from forgather.run_control import Action
from forgather.run_status import Status, of_this_process, write_status
from forgather.runs.run_folders import JOURNAL
from forgather.sweeps.driver import Sweep, trial_folder
from forgather.sweeps.journal import Journal, Outcome, read_history, sweep_lock
from forgather.sweeps.slots import Command
from forgather.sweeps.spec import SweepSpec


def made(folder):
    journal = Journal.create(str(folder), {"request": {}})
    journal.announce(0, {"a": "1"})
    journal.announce(1, {"a": "x"}, "[FG242] no")
    journal.started(0, 1, 4711)
    journal.ended(0, Outcome.KILLED, step=4)
    journal.started(0, 2, 4712)
    journal.ended(0, Outcome.FINISHED, step=9)
    return journal


def test_what_was_written_is_read(tmp_path):
    written = made(tmp_path).history
    read = Journal.open(str(tmp_path)).history
    assert written == read
    first, second = read.trials.values()
    assert (2, 2, (4,), Outcome.FINISHED, True) == (
        first.attempts,
        first.ends,
        first.kills,
        first.outcome,
        first.is_done,
    )
    assert ("[FG242] no", True) == (second.skipped, second.is_done)


def test_every_cut_loses_at_most_the_last_record(tmp_path):
    made(tmp_path)
    file = tmp_path / JOURNAL
    content = file.read_bytes()
    lines = content.split(b"\n")
    first = len(lines[0]) + 1
    for end in range(first, len(content) + 1):
        file.write_bytes(content[:end])
        whole = content[:end].count(b"\n")
        journal = Journal.open(str(tmp_path))
        assert len(journal.history.trials) == min(max(whole - 1, 0), 2)
        # What is appended afterwards is a line of its own.
        journal.announce(7, {})
        assert json.loads(file.read_bytes().split(b"\n")[-2])["trial"] == 7
    file.write_bytes(content[: first - 1])
    with pytest.raises(ProjectError, match="is empty"):
        Journal.open(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [lines[0], b"{", *lines[1:]], "damaged at line 2"),
        (lambda lines: [lines[0], b'{"event": "start", "trial": 9, "attempt": 1}', *lines[1:]], "damaged at line 2"),
        (lambda lines: [lines[0].replace(b'"form": 1', b'"form": 99'), *lines[1:]], "of a newer version"),
        (lambda lines: lines[1:], "damaged at line 1"),
        (lambda lines: [lines[0], b'{"event": "trial", "trial": 2, "values": 5}', b""], "damaged at line 2"),
        (lambda lines: [lines[0], b'{"event": "trial", "trial": 2, "values": {"a": 1}}', b""], "damaged at line 2"),
        (lambda lines: [lines[0], b'{"event": "trial", "trial": "2", "values": {}}', b""], "damaged at line 2"),
        (lambda lines: [lines[0].replace(b', "form": 1', b""), *lines[1:]], "damaged at line 1"),
        (lambda lines: [lines[0], b"[" * 99_999, *lines[1:]], "damaged at line 2"),
        (lambda lines: [lines[0], lines[1].replace(b'{"a": "1"}', b'["a"]'), *lines[2:]], "damaged at line 2"),
        (lambda lines: [lines[0], lines[1].replace(b'"1"', b"1"), *lines[2:]], "damaged at line 2"),
        (lambda lines: [*lines[:3], lines[3].replace(b'"attempt": 1', b'"attempt": "x"'), *lines[4:]], "at line 4"),
    ],
)
def test_damage_is_refused_by_line(tmp_path, change, said):
    made(tmp_path)
    file = tmp_path / JOURNAL
    file.write_bytes(b"\n".join(change(file.read_bytes().split(b"\n"))))
    with pytest.raises(ProjectError, match=said) as caught:
        read_history(str(tmp_path))
    assert "FG563" == caught.value.code


def test_a_folder_has_one_sweep(tmp_path):
    made(tmp_path)
    with pytest.raises(ProjectError, match="has a sweep already"):
        Journal.create(str(tmp_path), {})
    with pytest.raises(ProjectError, match="holds no sweep"):
        read_history(str(tmp_path / "none"))


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path, monkeypatch):
    journal = made(tmp_path)
    before = (tmp_path / JOURNAL).read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(ProjectError, match="no space left"):
        journal.announce(2, {})
    assert before == (tmp_path / JOURNAL).read_bytes()


def test_a_journal_that_a_full_disk_left_empty_is_begun_again(tmp_path):
    (tmp_path / JOURNAL).touch()
    assert 2 == len(made(tmp_path).history.trials)


def test_two_processes_never_run_one_sweep(tmp_path):
    with sweep_lock(str(tmp_path)):
        child = os.fork()
        if child == 0:
            try:
                with sweep_lock(str(tmp_path)):
                    os._exit(1)
            except ProjectError as error:
                os._exit(0 if error.code == "FG564" else 2)
        assert 0 == os.waitpid(child, 0)[1]
    with sweep_lock(str(tmp_path)):
        pass


class InstantSlots:
    """One place, in which each attempt ends at once; `act` is what it does before."""

    def __init__(self, status, act=lambda trial: None):
        self.number, self.status, self.act, self.trials = 1, status, act, set()

    def start(self, trial, command, log):
        self.act(trial)
        self.trials.add(trial)

    def adopt(self, trial, handle):
        return False

    def running(self):
        return set(self.trials)

    def ended(self):
        while self.trials:
            yield self.trials.pop(), self.status

    def close(self):
        pass


@pytest.mark.parametrize("before", [Status.INTERRUPTED, Status.FINISHED])
@pytest.mark.parametrize(("status", "attempts"), [(1, 2), (-9, 4), (None, 4)])
def test_an_attempt_without_a_run_folder_is_not_judged_by_an_earlier_run(tmp_path, before, status, attempts):
    journal = Journal.create(str(tmp_path), {})
    journal.announce(0, {})
    journal.started(0, 1, None)
    journal.ended(0, Outcome.INTERRUPTED, step=None)
    earlier = Path(trial_folder(str(tmp_path), 0)) / "runs" / "20260101T000000Z-work"
    earlier.mkdir(parents=True)
    write_status(str(earlier), replace(of_this_process(0.0), status=before))

    def refuse_to_go_on_forever():
        assert journal.history.trials[0].attempts <= attempts

    sweep = Sweep(
        journal=journal,
        spec=SweepSpec(parameters=()),
        slots=InstantSlots(status),
        next_trial=lambda: None,
        command=lambda trial, is_again: Command([], str(tmp_path)),
        changed=refuse_to_go_on_forever,
    )
    sweep.run()
    trial = read_history(str(tmp_path)).trials[0]
    assert (Outcome.FAILED, attempts) == (trial.outcome, trial.attempts)
    assert "20260101T000000Z-work" == trial.earlier_run


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_trial_that_a_user_stops_is_not_started_again(tmp_path, is_asked):
    journal = Journal.create(str(tmp_path), {})
    journal.announce(0, {})

    def interrupted(trial):
        attempt = journal.history.trials[0].attempts
        run_dir = Path(trial_folder(str(tmp_path), 0)) / "runs" / f"20260101T00000{attempt}Z-work"
        run_dir.mkdir(parents=True)
        is_over = attempt == 2
        write_status(
            str(run_dir), replace(of_this_process(0.0), status=Status.FINISHED if is_over else Status.INTERRUPTED)
        )
        if is_asked:
            record(str(run_dir), [Intervention(step=3, action=Action.STOP, who="ann")])

    sweep = Sweep(
        journal=journal,
        spec=SweepSpec(parameters=()),
        slots=InstantSlots(None, interrupted),
        next_trial=lambda: None,
        command=lambda trial, is_again: Command([], str(tmp_path)),
    )
    sweep.run()
    trial = read_history(str(tmp_path)).trials[0]
    expected = (Outcome.STOPPED, 1, "stopped by 'fgcli control'") if is_asked else (Outcome.FINISHED, 2, "")
    assert expected == (trial.outcome, trial.attempts, trial.cause)
