"""Checkpoints that are written while the run goes on.

Takes snapshots at step boundaries; gives checkpoints some steps later. Keeps true: the run waits for the copy of its
tensors, and for an earlier checkpoint that is not written yet; a thread writes, seals and prunes, and speaks with those
of other processes through a group of its own; what it fails with is raised in the run, on all processes after the same
step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from forgather.errors import CheckpointError
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.trainer.snapshot import Snapshot
from forgather.ml.trainer.staging import Staging

_log = get_logger(__name__)

# More than there are processes, and small enough to be added up.
_FAILED = 65536.0


class Background:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._channel = collectives.second_channel()
        self._pending: _Act | None = None
        self._has_waited = False

    def write(self, snapshot: Snapshot, write: Callable[[Snapshot], None]) -> None:
        """Begins to write a checkpoint; the one before is settled.

        Args:
            snapshot: of this process.
            write: does it, together with the other processes.
        """
        copy = self._staging.copy(snapshot)
        self._pending = _Act(snapshot.step, functools.partial(self._write, write, copy))

    def _write(self, write: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
        with collectives.through(self._channel):
            write(snapshot)

    def settled(self, *, wait: bool) -> bool:
        """Tells, on every process alike, whether the checkpoint is complete; every process asks after the same steps.

        Args:
            wait: for it.

        Raises:
            CheckpointError: it failed, see `Checkpoints.write`.
        """
        act = self._pending
        if act is None:
            return False
        told = 0.0
        if not wait:
            told = collectives.total(act.status)
            if told < collectives.size():  # as many as there are processes: all are done
                return False
        elif not act.is_done and not self._has_waited:
            self._has_waited = True
            _log.warning("waiting until the checkpoint of step %d is written", act.step)
        self._pending = None
        act.finish()
        if told >= _FAILED:
            raise CheckpointError(
                f"the checkpoint of step {act.step} could not be written by another process",
                code="FG609",
                hint="what that process says itself comes first; earlier checkpoints are untouched",
            )
        return True

    def leave(self) -> None:
        """Waits for what is being written, whatever other processes do.

        Raises:
            CheckpointError: it failed.
        """
        act, self._pending = self._pending, None
        if act is not None:
            act.finish()


class _Act:
    """What a thread does."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step = step
        self._act = act
        self._error: BaseException | None = None
        # A daemon: a run that is told to stop at once does not wait for it.
        self._thread = threading.Thread(target=self._run, name="forgather-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:  # noqa: BLE001 - the border of a thread: the run raises it
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def status(self) -> float:
        if not self.is_done:
            return 0.0
        return 1.0 if self._error is None else _FAILED

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
