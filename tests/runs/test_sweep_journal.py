"""The journal of a sweep: every cut of its file gives a sweep that goes on, and damage is refused by line."""

import json
import os

import pytest

from forgather.errors import ProjectError
from forgather.sweeps.journal import JOURNAL, Journal, Outcome, read_history, sweep_lock


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
