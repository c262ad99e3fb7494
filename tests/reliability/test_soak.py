"""R17: one run through a bad week: kills, refusals, damage, signals, losses of power, in any order, and the same end."""

import collections
import random
import shutil
import signal
import time

import pytest

from forgather.errors import ForgatherError
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from forgather.ml.checkpoint.manifest import MANIFEST
from tests.patience import patience
from tests.reliability import command, faults, job
from tests.reliability.bitflip import DAMAGES
from tests.reliability.forks import Child, in_child
from tests.reliability.powerloss import LoggedUntil, PowerIsGone, build, losses, read_tree

FULL, QUICK = 55, 8
COMMANDS = 5
KIND = "synchronous"
FULL_STEPS, QUICK_STEPS = 300, 100


def train(folder, steps, storage=None):
    settings = {"max_steps": steps, "save_steps": 2, "save_total_limit": 3}
    job.trainer(folder, KIND, storage, **settings).train(resume_from_checkpoint="auto")


def failing(folder, steps, fault, at):
    """Trains with a fault; returns the code of the error."""
    try:
        train(folder, steps, faults.Faulty(fault, at))
    except ForgatherError as error:
        return error.code
    return ""


class Week:
    """The faults, each of which begins with the run as the last one left it, and leaves it worse.

    `soon` is within how many seconds a fault of no certain moment comes.
    """

    def __init__(self, project, steps, dice, soon):
        self.project = project
        self.folder = project / "out"
        self.steps = steps
        self.dice = dice
        self.soon = soon

    def killed(self):
        child = Child(train, self.folder, self.steps)
        time.sleep(self.dice.uniform(0, self.soon))
        child.kill()
        assert 9 == child.ended().signal

    def killed_at_an_operation(self):
        assert 9 == in_child(failing, self.folder, self.steps, faults.Kill(), self.dice.randint(1, 200)).signal

    def refused(self):
        fault = faults.Refusal(self.dice.choice(faults.REFUSALS), lasting=self.dice.random() < 0.5)
        # Of so few operations none is a removal, which may fail without the run's failing.
        assert in_child(failing, self.folder, self.steps, fault, self.dice.randint(1, 30)).value in ("FG609", "FG817")

    def signaled(self):
        child = Child(train, self.folder, self.steps)
        time.sleep(self.dice.uniform(0, self.soon))
        child.signal(self.dice.choice([signal.SIGTERM, signal.SIGINT]))
        ended = child.ended()
        stopped = "KeyboardInterrupt" in ended.error or "Terminated" in ended.error
        assert stopped or ended.signal in (signal.SIGTERM, signal.SIGINT), ended

    def damaged(self):
        file = self._file_of_newest()
        file.write_bytes(self.dice.choice(list(DAMAGES.values()))(file.read_bytes(), self.dice))

    def removed(self):
        self._file_of_newest().unlink()

    def _file_of_newest(self):
        *earlier, (_, newest) = list_checkpoints(self.folder)
        assert earlier, "nothing would be left to go on from"
        names = sorted(file.name for file in newest.iterdir())
        return newest / self.dice.choice([*names, MANIFEST])

    def without_power(self):
        before = read_tree(self.folder)
        ended = in_child(_until_power_is_gone, self.folder, self.steps, self.dice.randint(1, 200))
        assert "" == ended.error, ended.error
        found = losses(before, ended.value, only_last=True, seed=self.dice.random())
        shutil.rmtree(self.folder)
        build(self.folder, self.dice.choice(found).files)

    def command_ended(self):
        """The real command is ended in the middle of its training, hard or kindly."""
        newest = max((step for step, _ in list_checkpoints(self.folder)), default=0)
        process = command.start(self.project, step_seconds=0.05)
        deadline = time.monotonic() + 60
        while max((step for step, _ in list_checkpoints(self.folder)), default=0) <= newest:
            assert process.poll() is None and time.monotonic() < deadline, (self.project / "log.txt").read_text()[
                -3000:
            ]
            time.sleep(0.02)
        process.send_signal(self.dice.choice([signal.SIGKILL, signal.SIGTERM]))
        assert process.wait(patience(30)) in (-signal.SIGKILL, 128 + signal.SIGTERM)


def _until_power_is_gone(folder, steps, at):
    storage = LoggedUntil(folder, at)
    try:
        train(folder, steps, storage)
    except PowerIsGone:
        pass
    return storage.log


MOMENTS = ("killed", "killed_at_an_operation", "refused", "signaled", "damaged", "removed", "without_power")


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_bad_week(full, figure, tmp_path):
    steps, count, commands = (FULL_STEPS, FULL, COMMANDS) if full else (QUICK_STEPS, QUICK, 0)
    dice = random.Random(28)
    kinds = [MOMENTS[number % len(MOMENTS)] for number in range(count - commands)] + ["command_ended"] * commands
    dice.shuffle(kinds)
    began = time.monotonic()
    assert "" == in_child(train, tmp_path / "clean", steps).error
    # Together, faults of no certain moment let about half of the run pass.
    soon = (time.monotonic() - began) / (kinds.count("killed") + kinds.count("signaled"))
    week = Week(command.make(tmp_path / "week", steps=steps, save_steps=2, last=3), steps, dice, soon)
    week.folder.mkdir()
    # The first checkpoints, so that every fault has something to harm.
    assert 9 == in_child(failing, week.folder, steps, faults.Kill(), 200).signal
    assert 2 <= len(list_checkpoints(week.folder))
    began = time.monotonic()
    for number, kind in enumerate(kinds):
        try:
            getattr(week, kind)()
        except BaseException as error:
            error.add_note(f"fault {number}: {kind}")
            raise
    at = job.newest_step(week.folder)
    assert at < steps, "the week ended before its faults"
    train(week.folder, steps)
    assert [] == job.differences(job.digest(tmp_path / "clean", steps), job.digest(week.folder, steps))
    shown = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(collections.Counter(kinds).items()))
    seconds = time.monotonic() - began
    figure("R17", f"{len(kinds)} faults ({shown}) until step {at} of {steps}: the same bits ({seconds:.0f} s)")
    assert seconds < patience(600)
