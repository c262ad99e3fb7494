"""A queue of runs: commands that wait until a place is free.

The input is arguments of `fgcli train`; the output is a journal, as a sweep has one, whose entries are commands.
Entries can be added and removed while another process runs the queue.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from forgather.errors import ProjectError
from forgather.launch.launch_files import refuse_secret
from forgather.sweeps.driver import Sweep
from forgather.sweeps.journal import JOURNAL, History, Journal, TrialHistory, read_history, sweep_lock
from forgather.sweeps.slots import Command, Slots
from forgather.sweeps.spec import SweepSpec

COMMAND, FOLDER = "command", "folder"
_ADDING = ".adding"


class Queue:
    """A queue in a folder.

    Args:
        folder: the folder, which is made when the first entry is added.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def entries(self) -> list[TrialHistory]:
        """Returns the entries, in the order in which they were added.

        Raises:
            ProjectError: FG563 if the journal is damaged, or that of a sweep.
        """
        if not os.path.exists(os.path.join(self.folder, JOURNAL)):
            return []
        return list(_of_queue(self.folder, read_history(self.folder)).trials.values())

    def add(self, words: Sequence[str], working_dir: str) -> int:
        """Adds a command, and returns its number.

        Args:
            words: the arguments of `fgcli`.
            working_dir: the working folder of the command.

        Raises:
            ProjectError: FG531 if the command contains a secret; FG563 if the folder cannot be written.
        """
        command = shlex.join(words)
        refuse_secret(command, "the queue would store it")
        with self._changing() as journal:
            number = len(journal.history.trials)
            journal.announce(number, {COMMAND: command, FOLDER: working_dir})
            return number

    def remove(self, number: int) -> None:
        """Removes an entry that has not been started.

        Raises:
            ProjectError: FG563 if there is no such entry, or it was started.
        """
        with self._changing() as journal:
            entry = journal.history.trials.get(number)
            if entry is None or not (entry.skipped or journal.announce(number, entry.values, "removed")):
                why = "is not in the queue" if entry is None else "was started already"
                raise ProjectError(f"entry {number} {why}", code="FG563", hint="fgcli queue ls lists what waits")

    def run(self, slots: Slots, changed: Callable[[Sweep], None]) -> list[TrialHistory]:
        """Runs the entries until none is left, those included that are added meanwhile; returns all entries.

        Args:
            slots: where they run.
            changed: a function that is called after each change.

        Raises:
            ProjectError: FG564 if another process runs the queue.
            KeyboardInterrupt: after Ctrl-C, when the running entries have ended.
        """
        with self._changing() as journal:
            pass  # it exists now
        with sweep_lock(self.folder):
            sweep = Sweep(
                journal=journal,
                spec=SweepSpec(parameters=()),
                slots=slots,
                next_trial=lambda: None,
                command=lambda entry, _: Command(shlex.split(entry.values[COMMAND]), entry.values[FOLDER]),
            )
            sweep.changed = lambda: changed(sweep)
            sweep.run()
            return list(journal.history.trials.values())

    @contextmanager
    def _changing(self) -> Iterator[Journal]:
        """Context manager that gives the journal; two processes that add entries get different numbers."""
        from filelock import FileLock  # a late import: listing the queue does not need it

        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            with FileLock(os.path.join(self.folder, _ADDING)):
                is_new = not os.path.exists(os.path.join(self.folder, JOURNAL))
                journal = Journal.create(self.folder, {}) if is_new else Journal.open(self.folder)
                _of_queue(self.folder, journal.history)
                yield journal
        except OSError as error:
            raise ProjectError(
                f"the queue {self.folder!r} cannot be written: {error.strerror or error}",
                code="FG563",
                hint="name another folder: --queue DIR",
            ) from None


def _of_queue(folder: str, history: History) -> History:
    """Returns the history of a queue; raises an error if it is that of a sweep."""
    if all({COMMAND, FOLDER} <= entry.values.keys() for entry in history.trials.values()):
        return history
    raise ProjectError(
        f"{folder!r} holds a sweep, and no queue",
        code="FG563",
        hint="name another folder: --queue DIR; 'fgcli sweep --resume DIR' goes on with a sweep",
    )


def default_queue() -> str:
    """Returns the folder of the user's queue on this machine."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "forgather", "queue")
