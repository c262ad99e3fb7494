"""R9: whatever is saved, fails or is removed in whatever order, what must stay stays."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from forgather.errors import CheckpointError
from forgather.ml.checkpoint import Retention, checkpoint_folder, list_checkpoints, newest_verified, verify
from forgather.ml.trainer.checkpoint_writer import CheckpointWriter
from forgather.ml.trainer.snapshot import Snapshot
from tests.reliability.faults import Faulty, Refusal


class Died(BaseException):
    """Stands for the death of the process: nothing is done after it."""


class Death:
    """A fault after which a storage does nothing more."""

    def strike(self, what):
        raise Died


class Mortal(Faulty):
    """A storage that may fail once, or for good."""

    dead = False

    def next(self, fault, within):
        """The operation number `within` from here meets a fault."""
        self.fault, self.at, self.struck = fault, len(self.operations) + within, None

    def meet(self, name, file, before=lambda: None):
        if self.dead:
            raise Died
        self.dead = isinstance(self.fault, Death) and len(self.operations) + 1 == self.at
        super().meet(name, file, before)


class Retained(RuleBasedStateMachine):
    """A run that saves, and the model of what must be there."""

    @initialize(last=st.none() | st.integers(1, 4), best=st.integers(1, 3), every=st.none() | st.integers(2, 5))
    def begin(self, last, best, every):
        self.folder = Path(tempfile.mkdtemp(prefix="forgather-retention-"))
        self.retention = Retention(last=last, best=best, every=every)
        self.step = 0
        self.metrics, self.saved, self.foreign = {}, [], set()
        self.checkpoints = self.made()
        # What another process that is alive is writing.
        self.in_progress = self.folder / f".saving-checkpoint-3-{os.getppid()}"
        self.in_progress.mkdir()

    def teardown(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def made(self):
        return CheckpointWriter(self.folder, Mortal(), retention=self.retention, max_steps=1000, facts={})

    def present(self):
        return {step for step, _ in list_checkpoints(self.folder)}

    def ranked(self):
        return sorted(self.metrics, key=self.metrics.get)

    def write(self):
        snapshot = Snapshot(step=self.step, tensors={}, texts={"a": b"%d" % self.step, "deep/b": b"b" * 9})
        self.checkpoints.write(snapshot, ranked=self.ranked())

    def note_saved(self):
        self.saved = [step for step in self.saved if step != self.step] + [self.step]

    @rule(metric=st.none() | st.integers(0, 9), advance=st.integers(0, 3))
    def save(self, metric, advance):
        self.advance(metric, advance)
        self.write()
        self.note_saved()
        own = [step for step in self.present() - self.foreign if not self.retention.keeps_for_ever(step)]
        if self.retention.last is not None:
            assert len(own) <= max(self.retention.last, self.retention.best + 1)

    @rule(
        metric=st.none() | st.integers(0, 9),
        advance=st.integers(0, 3),
        within=st.integers(1, 45),
        number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES]),
    )
    def save_fails(self, metric, advance, within, number):
        self.advance(metric, advance)
        before = self.present()
        self.checkpoints.storage.next(Refusal(number), within)
        try:
            self.write()
        except CheckpointError as error:
            assert "FG609" == error.code
            # Where its place was being taken, the checkpoint is there although the folder's entry may not be safe yet.
            assert before <= self.present()
            if self.step not in before and self.step in self.present():
                self.note_saved()
        else:
            self.note_saved()
        self.checkpoints.storage.next(None, 0)

    @rule(metric=st.none() | st.integers(0, 9), advance=st.integers(0, 3), within=st.integers(1, 45))
    def dies_and_goes_on(self, metric, advance, within):
        self.advance(metric, advance)
        self.checkpoints.storage.next(Death(), within)
        try:
            self.write()
            self.note_saved()
        except Died:
            pass
        run = self.checkpoints.run_id
        self.checkpoints = self.made()
        if newest_verified(self.folder)[0] is not None:
            self.checkpoints.run_id = run
        if self.step in self.present() and self.step not in self.saved:
            self.note_saved()

    @rule(ahead=st.integers(1, 40))
    def another_run_writes(self, ahead):
        step = self.step + 100 + ahead
        other = self.made()
        other.write(Snapshot(step=step, tensors={}, texts={"a": b"other"}))
        if step not in self.present():
            raise AssertionError("a checkpoint that was written is not there")
        self.foreign = {step for step in self.present() if step > 100 and step not in self.saved}

    def advance(self, metric, advance):
        # Steps of the run stay below those of the other one.
        self.step = min(self.step + advance, 99)
        if metric is not None:
            self.metrics.setdefault(self.step, metric)

    @invariant()
    def what_must_stay_is_there(self):
        if not hasattr(self, "folder"):
            return
        present = self.present()
        best = [step for step in self.ranked() if step in self.saved][: self.retention.best]
        for_ever = [step for step in self.saved if self.retention.keeps_for_ever(step)]
        assert {*self.saved[-1:], *best, *for_ever, *self.foreign} <= present
        assert self.in_progress.is_dir()
        for step in present:
            verify(checkpoint_folder(self.folder, step))


def test_what_must_stay_stays_whatever_happens(full, figure):
    examples = 500 if full else 20
    run_state_machine_as_test(
        Retained, settings=settings(max_examples=examples, stateful_step_count=12, deadline=None, database=None)
    )
    figure("R9", f"{examples} sequences of saves, failures, deaths and removals: nothing removed that must stay")
