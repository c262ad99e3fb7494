"""Ctrl-C, the SIGTERM of a scheduler, its SIGUSR1, or the end of a terminal, at a moment that suits the run.

Takes SIGINT, SIGTERM, SIGUSR1 and SIGHUP of this process; gives a flag, or an exception. Keeps true: as long as
nothing would be lost, the first signal ends at once what is done; once a run has begun, it is remembered, so that what
is saved is whole, and the second one ends at once; a program that native code keeps from hearing of its end is ended
from the outside; the handlers that were there come back.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from forgather.process_limits import LISTENER

# Each more than there are processes with the one before, and small enough to be added up in float32.
_WISHES = {signal.SIGINT: 1.0, signal.SIGHUP: 2.0**16, signal.SIGTERM: 2.0**16, signal.SIGUSR1: 2.0**32}
_USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,  # nohup has it ignored, and it stays so
}
STATUS = 128 + signal.SIGTERM
"""The exit status of a run that a signal ended which is not Ctrl-C, whichever it was."""
DEAF_SECONDS, LEAVING_SECONDS = 1.0, 8.0
SAME_SECONDS, SAME_OF_SEVERAL_SECONDS = 0.1, 1.0
"""Within these, a further signal is the first one once more: a scheduler signals a job and its group at one moment, and
a launcher passes on to its processes what a terminal has sent to all of them already."""
NOTHING_TRAINED = "interrupted; nothing was trained yet, so there is nothing to save"


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGUSR1 or SIGHUP ended the run, as Ctrl-C does: the state was saved where saving is on."""

    signal_number = signal.SIGTERM


def status_of(stop: BaseException) -> int:
    """Returns the exit status of a run that ended so.

    Example:
        >>> status_of(Terminated()), status_of(KeyboardInterrupt())
        (143, 130)
    """
    return 128 + int(getattr(stop, "signal_number", signal.SIGINT))


class Interrupt:
    """Hears the signals that end a run. In a thread other than the main one, signals are left alone.

    Args:
        same_within: seconds within which a second signal is taken for the first one.
        insists: end the process where it does not end by itself, because native code keeps it.
        speaks: tell so; with several processes, one of them does.
    """

    def __init__(self, *, same_within: float = SAME_SECONDS, insists: bool = False, speaks: bool = True) -> None:
        self.requested = False
        self.began = False
        """True once something was trained, which an end at once would lose."""
        self.is_told = False
        """True once a trainer has said that it will tell when it begins."""
        self.defers = False
        """True while the first signal is remembered, and does not end anything by itself."""
        self.at_once = False
        """True once a signal has ended what was done, wherever that was."""
        self.is_quiet: Callable[[], bool] = bool
        """Tells whether the end of this process is told elsewhere, with its reason."""
        self.wants_requeue = False
        """True after SIGUSR1, by which a scheduler announces its end to a job that is to go on later."""
        self.same_within = same_within
        self.speaks = speaks
        self._insists = insists
        self._at = 0.0
        self._previous: dict[int, Any] = {}
        self._number = signal.SIGINT
        self._wakeup: tuple[int, int, int] | None = None

    def __enter__(self) -> Interrupt:
        _active.append(self)
        if threading.current_thread() is threading.main_thread():
            # A program that ignores a signal, or handles it in its own way, goes on doing so.
            for number, usual in _USUAL.items():
                if signal.getsignal(number) is usual:
                    self._previous[number] = signal.signal(number, self._remember)
            if self._insists:
                self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _active:
            _active.remove(self)
        if self._wakeup is not None:
            _, writing, before = self._wakeup
            self._wakeup = None
            signal.set_wakeup_fd(before)
            os.close(writing)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, handler)
        self._previous.clear()

    def forget(self) -> None:
        """Lets a process that was made by fork end as any other does: what it hears is not for its parent."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
        self._restore()

    def begin(self) -> None:
        """Notes that from here on an end at once would lose something: a signal is remembered."""
        self.began = self.defers = True

    @property
    def error(self) -> KeyboardInterrupt:
        """What to raise at the end of the step."""
        return KeyboardInterrupt() if self._number == signal.SIGINT else Terminated()

    @property
    def wish(self) -> float:
        """What processes add up to learn whether one of them was asked to stop, and how."""
        return _WISHES[self._number] if self.requested else 0.0

    def told(self, wishes: float) -> KeyboardInterrupt | None:
        """Returns what to raise for the wishes of all processes; None where there are none."""
        if not wishes:
            return None
        self.wants_requeue |= wishes >= _WISHES[signal.SIGUSR1]
        return Terminated() if wishes >= _WISHES[signal.SIGTERM] else KeyboardInterrupt()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        now = time.monotonic()
        if self.requested and now - self._at < self.same_within:
            return
        is_second, self.requested, self._at = self.requested, True, now
        self._number = signal.Signals(number)
        self.wants_requeue |= number == signal.SIGUSR1
        if is_second or not self.defers:
            self.at_once = True
            raise self.error
        again = "press Ctrl-C again" if number == signal.SIGINT else f"send {self._number.name} again"
        # The signal may have come in the middle of a line to the same stream, which takes no second one then.
        with suppress(RuntimeError):
            if self.speaks:
                import logging  # whatever trains has loaded it; the other commands need none

                logging.getLogger(__name__).warning("stopping; %s to stop at once", again)

    def _listen(self) -> None:
        """Hears signals beside the main thread, too, where handlers wait until native code has ended."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._wakeup = (reading, writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        threading.Thread(target=self._see_to_the_end, args=(reading,), name=LISTENER, daemon=True).start()

    def _see_to_the_end(self, reading: int) -> None:
        heard = 0
        first = 0.0
        while number := os.read(reading, 1):
            # A launcher of processes puts handlers of its own in the place of these.
            if number[0] not in self._previous or signal.getsignal(number[0]) != self._remember:
                continue
            if heard and time.monotonic() - first < self.same_within:
                continue
            heard, first = heard + 1, time.monotonic()
            if self.defers and heard < 2:
                continue
            time.sleep(DEAF_SECONDS)
            if not self.at_once and self._wakeup is not None:
                self._end(number[0])
            time.sleep(LEAVING_SECONDS)
            if self._wakeup is not None:
                self._end(number[0])
        os.close(reading)

    def _end(self, number: int) -> None:
        if self.speaks and not self.is_quiet():
            with suppress(OSError):
                os.write(2, f"{'interrupted' if self.began else NOTHING_TRAINED}\n".encode())
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(130 if number == signal.SIGINT else STATUS)


def _leave_terminal() -> None:
    """Lets what is still printed go nowhere, where nobody can read it any more: a line must not end the save."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if _is_gone(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)


def _is_gone(stream: int) -> bool:
    import select
    import termios

    try:
        termios.tcgetattr(stream)
    except termios.error as error:
        if error.args[0] != errno.ENOTTY:  # a terminal that was hung up answers nothing
            return True
    except OSError:
        return False
    events = select.poll()
    events.register(stream, 0)
    return stream > 0 and any(event & select.POLLERR for _, event in events.poll(0))  # a pipe that nobody reads


_active: list[Interrupt] = []
_heard: list[Interrupt] = []


def _in_child() -> None:
    for interrupt in _active:
        interrupt.forget()
    _active.clear()
    _heard.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def _ended_by(interrupt: Interrupt) -> Iterator[None]:
    """Has what a signal ended at once end as such, whatever native code made of the exception on its way."""
    try:
        yield
    except Exception as error:
        if interrupt.at_once:
            raise interrupt.error from error
        raise


@contextmanager
def of_process(interrupt: Interrupt) -> Iterator[Interrupt]:
    """Hears the signals of a whole program, from its start to its end: `heard` finds it."""
    with interrupt, _ended_by(interrupt):
        _heard.append(interrupt)
        try:
            yield interrupt
        finally:
            _heard.remove(interrupt)


@contextmanager
def heard(*, same_within: float = SAME_SECONDS, speaks: bool = True) -> Iterator[Interrupt]:
    """Yields what hears the signals of this process: that of the program around the block, or one for the block."""
    if not _heard:
        with Interrupt(same_within=same_within, speaks=speaks) as own, _ended_by(own):
            yield own
        return
    interrupt = _heard[-1]
    interrupt.is_told = True
    try:
        with _ended_by(interrupt):
            yield interrupt
    finally:
        interrupt.defers = False


def present() -> Interrupt | None:
    """Returns what hears the signals of this program; None where only a training does."""
    return _heard[-1] if _heard else None


def ignore_signals() -> None:
    """Has this process hear no further signal: it is about to end, and everything is done."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def end_promptly(status: int) -> None:
    """Ends this process at once when its handlers have run (register it with `atexit`): nothing is torn down.

    The interpreter's teardown takes seconds that other processes wait. And threads of process groups outlive their
    groups: one that lets go of a tensor during the teardown wants the interpreter's lock, and aborts the process.
    """
    atexit.unregister(end_promptly)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def leave_to_parent() -> None:
    """Has a process that works for this one, and was made by fork, leave all signals to it but its own SIGTERM.

    Ctrl-C reaches every process of a terminal, and the signals of a scheduler every process of a job: a worker that
    died of one would fail the step that its parent wants to end.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_by_parent, args=(os.getppid(),), name=LISTENER, daemon=True).start()


def _end_by_parent(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if sender == parent or os.getppid() != parent:
            os._exit(0)
