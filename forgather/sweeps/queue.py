"""A queue of runs: commands that wait until a place is free.

The input is arguments of `fgcli train`; the output is a journal, as a sweep has one, whose entries are commands.
Entries can be added and removed while another process runs the queue.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from forgather.errors import ProjectError
from forgather.launch.launch_files import refuse_secret
from forgather.runs.run_folders import JOURNAL
from forgather.sweeps.driver import Sweep
from forgather.sweeps.journal import Journal, TrialHistory, is_begun, read_history, sweep_lock
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
        if not is_begun(self.folder):
            return []
        # Read without opening the journal, which another process may be writing.
        return _commands(self.folder, read_history(self.folder).trials.values())

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

    def remove(self, numbers: Sequence[int]) -> None:
        """Removes entries that have not been started: all of them, or none.

        Raises:
            ProjectError: FG563 if there is no such entry, or it was started.
        """
        with self._changing() as journal:
            for number in numbers:
                entry = journal.history.trials.get(number)
                if entry is None or entry.attempts or entry.is_done:
                    is_missing = entry is None or entry.skipped is not None
                    raise _not_waiting(number, "is not in the queue" if is_missing else "was started already")
            for number in dict.fromkeys(numbers):
                if not journal.announce(number, journal.history.trials[number].values, "removed"):
                    raise _not_waiting(number, "was started already")

    def run(self, slots: Slots, changed: Callable[[Sweep], None]) -> list[TrialHistory]:
        """Runs the entries until none is left, those included that are added meanwhile; returns all entries.

        Args:
            slots: where they run.
            changed: a function that is called after each change.

        Raises:
            ProjectError: FG564 if another process runs the queue.
            KeyboardInterrupt: after Ctrl-C, when the running entries have ended.
        """
        self._make_folder()
        with sweep_lock(self.folder, "queue", "add the command: it is run there, too"):
            with self._changing() as journal:
                pass  # it exists now
            _commands(self.folder, journal.history.trials.values())
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

        self._make_folder()
        try:
            with FileLock(os.path.join(self.folder, _ADDING)):
                yield Journal.open(self.folder) if is_begun(self.folder) else Journal.create(self.folder, {})
        except OSError as error:
            raise self._unwritable(error) from None

    def _make_folder(self) -> None:
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ProjectError:
        return ProjectError(
            f"the queue {self.folder!r} cannot be written: {error.strerror or error}",
            code="FG563",
            hint="name another folder: --queue DIR",
        )


def _commands(folder: str, entries: Iterable[TrialHistory]) -> list[TrialHistory]:
    """Returns entries of a journal that are commands.

    Raises:
        ProjectError: FG563 if an entry is a trial of a sweep.
    """
    found = list(entries)
    if any(not {COMMAND, FOLDER} <= entry.values.keys() for entry in found):
        raise ProjectError(
            f"{folder!r} is the folder of a sweep, not of a queue",
            code="FG563",
            hint="go on with it: fgcli sweep --resume DIR; or name another folder: --queue DIR",
        )
    for entry in found:
        try:
            shlex.split(entry.values[COMMAND])
        except ValueError as error:
            raise ProjectError(
                f"command {entry.number} of the queue {folder!r} is damaged: {error}",
                code="FG563",
                hint=f"remove its line from {JOURNAL}",
            ) from None
    return found


def _not_waiting(number: int, why: str) -> ProjectError:
    return ProjectError(f"entry {number} {why}", code="FG563", hint="fgcli queue ls lists what waits")


def default_queue() -> str:
    """Returns the folder of the user's queue on this machine."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "forgather", "queue")
