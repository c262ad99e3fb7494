"""The end of a sweep by a signal: it leaves no process of its trials, and counts no kill against a trial."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgather import interrupt
from forgather.runs.run_folders import JOURNAL
from forgather.sweeps.driver import MOST_ATTEMPTS, Sweep
from forgather.sweeps.journal import Journal, Outcome, read_history
from forgather.sweeps.slots import Command
from forgather.sweeps.spec import SweepSpec
from tests.matrix import thinned
from tests.patience import patience
from tests.project.workbench import make_project

WORK = """\
import os, time

def run(run_dir, seconds):
    with open(os.path.join(run_dir, f"rank{os.environ['RANK']}"), "w"):
        time.sleep(seconds)
"""
CONFIG = """\
.run_dir: &run_dir !var {name: run_dir, default: ~}
meta: {config_name: work, output_dir: out, nproc_per_node: 2}
main: !partial:work.py:run {run_dir: *run_dir, seconds: 600}
"""
MOMENTS = [(number, at) for number in (signal.SIGKILL, signal.SIGTERM) for at in ("started", "running")]


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "moment"), thinned(MOMENTS, lambda number, moment: False))
def test_a_sweep_that_is_ended_leaves_no_process_of_its_trials(tmp_path, number, moment):
    folder = Path(make_project(tmp_path / "work", {"work.py": WORK, "templates/configs/work.yaml": CONFIG}))
    words = ["-t", "work", "sweep", "--grid", "main.seconds=600,700", "--name", "a"]
    sweep = subprocess.Popen([sys.executable, "-m", "forgather", *words], cwd=folder, stderr=subprocess.DEVNULL)
    trial = folder / "out/sweeps/a/trials/0000"

    def processes():
        found = subprocess.run(["pgrep", "-f", str(trial)], capture_output=True, text=True, check=False)
        return found.stdout.split()

    def wait(condition, seconds):
        deadline = time.monotonic() + patience(seconds)
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    # torchrun and two processes; the run folder has a file of each once they have found each other.
    wait(lambda: len(processes()) == 3 if moment == "started" else len([*trial.glob("runs/*/rank*")]) == 2, 120)
    sweep.send_signal(number)
    assert sweep.wait(patience(60)) == (-9 if number == signal.SIGKILL else 143)
    wait(lambda: not processes(), 15)
    outcome = read_history(str(folder / "out/sweeps/a")).trials[0].outcome
    assert outcome is (None if number == signal.SIGKILL else Outcome.INTERRUPTED)


class Interrupted:
    """A place whose trial ends by SIGTERM, as a process does that has not yet imported what handles the signal."""

    number = 1

    def __init__(self):
        self.trials, self.is_stopped = set(), False

    def start(self, trial, command, log):
        self.trials.add(trial)

    def adopt(self, trial, handle):
        return False

    def running(self):
        return set(self.trials)

    def ended(self):
        if not self.is_stopped:
            raise KeyboardInterrupt
        while self.trials:
            yield self.trials.pop(), -signal.SIGTERM

    def stop(self, trial):
        self.is_stopped = True

    def close(self):
        pass


class Saving(Interrupted):
    """A place whose trial takes a second to save, after it was asked to end."""

    def __init__(self, ready):
        super().__init__()
        self.ready = ready

    def ended(self):
        os.write(self.ready, b"-")
        if self.is_stopped and time.monotonic() > self.stopped_at + 1:
            while self.trials:
                yield self.trials.pop(), 143

    def stop(self, trial):
        self.is_stopped, self.stopped_at = True, time.monotonic()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_sweep_waits_for_trials_that_save_for_longer_than_an_interrupted_command_may_take(
    tmp_path, monkeypatch, number, status
):
    monkeypatch.setattr(interrupt, "DEAF_SECONDS", 0.05)
    monkeypatch.setattr(interrupt, "LEAVING_SECONDS", 0.1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with interrupt.handle_signals(interrupt.Interrupt(insists=True)):
                sweep_of_one(tmp_path, Saving(writing)).run()
        except KeyboardInterrupt as stop:
            os._exit(interrupt.status_of(stop))
        os._exit(0)
    os.read(reading, 1)
    os.kill(child, number)
    assert status == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert Outcome.INTERRUPTED is read_history(str(tmp_path)).trials[0].outcome
    os.close(reading)
    os.close(writing)


def sweep_of_one(folder, slots):
    has_begun = os.path.exists(folder / JOURNAL)
    journal = Journal.open(str(folder)) if has_begun else Journal.create(str(folder), {})
    if not has_begun:
        journal.announce(0, {})
    return Sweep(
        journal=journal,
        spec=SweepSpec(parameters=()),
        slots=slots,
        next_trial=lambda: None,
        command=lambda trial, is_again: Command([], os.getcwd()),
    )


def test_a_trial_that_is_interrupted_often_before_its_first_step_has_not_failed(tmp_path):
    for _ in range(MOST_ATTEMPTS):
        with pytest.raises(KeyboardInterrupt):
            sweep_of_one(tmp_path, Interrupted()).run()
    trial = read_history(str(tmp_path)).trials[0]
    assert (MOST_ATTEMPTS, Outcome.INTERRUPTED, ()) == (trial.ends, trial.outcome, trial.kills)
