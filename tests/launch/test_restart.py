"""Whether a run that failed is started again, and what it goes on from."""

import os
import signal
import stat

import pytest

from forgather.interrupt import Interrupt, handle_signals
from forgather.launch.in_process import Outcome
from forgather.launch.restart import RESUME_VARIABLE, RestartPolicy, requeue, resumes_after_restart
from forgather.ml.checkpoint.checkpoint_dir import write_checkpoint
from forgather.ml.checkpoint.lineage import next_origin
from forgather.ml.distributed.launcher import Failure, LaunchResult, _forwarded_signals, unreported_cause
from forgather.ml.distributed.root_cause import FailureKind, FailureRecord
from forgather.project.fault_tolerance import FaultTolerance


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.delenv(RESUME_VARIABLE, raising=False)
    monkeypatch.setenv(RESUME_VARIABLE, "")


def checkpoint(folder, step):
    run = next_origin(folder, f"run of {step}", 1000)
    write_checkpoint(folder, step, lambda draft: draft.write("a", [b"a"]), facts={"run": run})


def asked(tmp_path, failure, *, before=(), written=(), replaces=None, auto_resume=True, resume=None):
    """Returns the answer, what was said, and what the next processes are told."""
    said = []
    for step in before:
        checkpoint(tmp_path, step)
    again = RestartPolicy(str(tmp_path), auto_resume=auto_resume, resume=resume, world_size=2, say=said.append)
    for step in written:
        checkpoint(tmp_path, step)
    if replaces is not None:
        (tmp_path / f"checkpoint-{replaces}").rename(tmp_path / f".replaced-checkpoint-{replaces}-999999999")
    return again([failure], 2, 4), said, os.environ[RESUME_VARIABLE]


KILLED = Failure(1, -signal.SIGKILL, None, "step 3, update")


def test_a_run_goes_on_from_what_it_has_written(tmp_path):
    answer, said, told = asked(tmp_path, KILLED, before=[900], written=[2])
    assert (True, "auto") == (answer, told)
    cause = "after rank 1 of 2 was ended by SIGKILL in step 3, update, without an error message"
    assert [f"attempt 2 of 4, {cause}; resuming from step 2"] == said


def test_a_run_goes_on_from_what_it_was_about_to_replace(tmp_path):
    answer, said, told = asked(tmp_path, KILLED, before=[900], written=[2], replaces=2)
    assert (True, "auto") == (answer, told)
    assert said[0].endswith("; resuming from step 2")


def test_a_run_that_has_written_nothing_leaves_the_checkpoints_of_an_earlier_one(tmp_path):
    answer, said, told = asked(tmp_path, KILLED, before=[900])
    assert (True, "no") == (answer, told)
    assert said[0].endswith("; starting from the beginning: nothing was saved yet")


def test_a_run_that_is_not_to_resume_begins_anew(tmp_path):
    answer, said, told = asked(tmp_path, KILLED, written=[2], auto_resume=False)
    assert (True, "no") == (answer, told)
    assert said[0].endswith("; starting from the beginning, because auto_resume is false")


def test_a_run_that_went_on_and_has_written_nothing_since_goes_on_from_there_again(tmp_path):
    answer, said, told = asked(tmp_path, KILLED, before=[900], resume="auto")
    assert (True, "auto") == (answer, told)
    assert said[0].endswith("; resuming from step 900")


@pytest.mark.parametrize(("resume", "auto_resume"), [("out/checkpoint-900", True), ("auto", False)])
def test_a_run_that_begins_as_its_config_says_does_not_claim_to_begin_anew(tmp_path, resume, auto_resume):
    answer, said, told = asked(tmp_path, KILLED, before=[900], resume=resume, auto_resume=auto_resume)
    assert (True, "no") == (answer, told)
    assert said[0].endswith(f"; starting as before, with resume_from_checkpoint: {resume}")


@pytest.mark.parametrize(
    ("kind", "code", "answer", "line"),
    [
        (FailureKind.CAUSE, "FG818", False, "not tried again: FG818 would end the next attempt, too"),
        (
            FailureKind.CAUSE,
            "FG609",
            True,
            "attempt 2 of 4, after rank 0 in step 3: the message; starting from the beginning",
        ),
        (
            FailureKind.CAUSE,
            "",
            True,
            "attempt 2 of 4, after rank 0 in step 3: the message; starting from the beginning",
        ),
        (FailureKind.STOPPED, "", False, ""),
    ],
)
def test_a_mistake_and_a_wish_to_stop_are_not_tried_again(tmp_path, kind, code, answer, line):
    record = FailureRecord(kind, "the message", "step 3", True, 1.0, code)
    found, said, _ = asked(tmp_path, Failure(0, 1, record))
    assert answer is found
    assert line == "" if not said else said[0].startswith(line)


def test_an_error_of_several_ranks_is_printed_once():
    def failed(rank, message, told):
        return Failure(rank, 1, FailureRecord(FailureKind.CAUSE, message, "step 3", told, 1.0 + rank, "FG794"))

    same = LaunchResult((failed(0, "rows of documents", False), failed(1, "rows of documents", True)))
    assert unreported_cause(same, 2) is None
    other = unreported_cause(LaunchResult((failed(0, "no space", False), failed(1, "rows of documents", True))), 2)
    assert other is not None and other.message.startswith("rank 0 of 2: no space")


@pytest.mark.parametrize(
    ("tolerance", "environ", "expected"),
    [
        (None, {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
        (FaultTolerance(), {}, False),
        (FaultTolerance(), {"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        (FaultTolerance(), {"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        (FaultTolerance(), {"SLURM_RESTART_COUNT": "2"}, True),
        (FaultTolerance(), {"TORCHELASTIC_RESTART_COUNT": "1", RESUME_VARIABLE: "no"}, False),
        (FaultTolerance(auto_resume=False), {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
        (FaultTolerance(auto_resume=False), {"SLURM_RESTART_COUNT": "1"}, False),
        (None, {"SLURM_RESTART_COUNT": "1"}, True),
        (None, {"SLURM_RESTART_COUNT": "0"}, False),
    ],
)
def test_only_a_further_attempt_goes_on_by_itself(tolerance, environ, expected):
    assert expected is resumes_after_restart(tolerance, environ)


def ended(**given):
    return Outcome(status=143, run_dir="", interrupted=True, **given)


@pytest.mark.parametrize(
    ("number", "outcome", "script", "line"),
    [
        (signal.SIGUSR1, ended(checkpoint="c"), "exit 0", "job 77 is requeued"),
        (signal.SIGUSR1, ended(nothing_trained=True), "exit 0", "job 77 is requeued"),
        (
            signal.SIGUSR1,
            ended(),
            "exit 0",
            "job 77 is not requeued: nothing was saved, so it would start from the beginning",
        ),
        (signal.SIGUSR1, ended(checkpoint="c"), "echo no such job >&2; exit 1", "scontrol failed: no such job"),
        (signal.SIGUSR1, ended(checkpoint="c"), None, "scontrol was not found"),
        (signal.SIGTERM, ended(checkpoint="c"), "exit 0", None),
    ],
)
def test_a_job_is_queued_again_after_sigusr1(tmp_path, monkeypatch, number, outcome, script, line):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n{script}\n')
        program.chmod(stat.S_IRWXU)
    with handle_signals(Interrupt()) as interrupt:
        interrupt.begin()
        signal.raise_signal(number)
        told = requeue(outcome, {"SLURM_JOB_ID": "77"}, resumes=True)
    assert line == told if line is None else line in told
    called = tmp_path / "called"
    assert not called.exists() or called.read_text() == "requeue 77\n"


def test_a_run_outside_of_slurm_is_not_queued():
    with handle_signals(Interrupt()) as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGUSR1)
        assert requeue(ended(checkpoint="c"), {}, resumes=True) is None


def test_a_job_that_would_begin_anew_each_time_is_not_queued():
    with handle_signals(Interrupt()) as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGUSR1)
        told = requeue(ended(checkpoint="c"), {"SLURM_JOB_ID": "77"}, resumes=False)
    assert told == "job 77 is not requeued: it would start from the beginning each time, and never finish"


def test_torchrun_passes_the_end_of_a_terminal_on_unless_nohup_has_it_ignored():
    names = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert f"{names},SIGUSR1" == _forwarded_signals(names)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert "SIGTERM,SIGINT,SIGQUIT,SIGUSR1" == _forwarded_signals(names)
    finally:
        signal.signal(signal.SIGHUP, before)
