"""Handling of SIGINT, SIGTERM, SIGUSR1 and SIGHUP: when a signal ends a command or a run.

A signal raises an exception or sets a flag that the training loop reads at the end of a step. Before the first training
step, the first signal ends the command at once. Later the first signal is only recorded, so that the step and the
checkpoint are completed, and a second signal ends the run at once. If the main thread is stuck in native code, a second
thread ends the process. The previous handlers are restored at the end.
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

# Each value is larger than the number of processes times the one before, so that the sum over all processes tells which
# signals arrived; and small enough to be summed in float32.
_STOP_CODES = {signal.SIGINT: 1.0, signal.SIGHUP: 2.0**16, signal.SIGTERM: 2.0**16, signal.SIGUSR1: 2.0**32}
REQUEST_CODE = 0.5
"""The code of a waiting control request, which only the main process adds to the sum of the stop codes. It is smaller
than the code of every signal, so that it is lost only in a sum that ends the run.
"""
_DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,  # nohup sets SIG_IGN before the program starts, and then it stays ignored
}
STATUS = 128 + signal.SIGTERM
"""The exit status of a run that ended by SIGTERM, SIGUSR1 or SIGHUP."""
DEAF_SECONDS, LEAVING_SECONDS = 1.0, 8.0
"""Units: seconds. The time that the main thread has to react to a signal, and the time that it then has to end. After
that the second thread ends the process.
"""
SAME_SECONDS, SAME_OF_SEVERAL_SECONDS = 0.1, 1.0
"""Units: seconds. A further signal within this time counts as a repeat of the first: a scheduler signals a job and its
process group at the same moment, and a launcher forwards to its processes what the terminal has already sent to all
of them.
"""
NOTHING_TRAINED = "interrupted; nothing was trained yet, so there is nothing to save"


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGUSR1 or SIGHUP ended the run in the way of Ctrl-C; the state was saved if saving is enabled."""

    signal_number = signal.SIGTERM


def status_of(stop: BaseException) -> int:
    """Returns the exit status of a run that ended with this exception.

    Example:
        >>> status_of(Terminated()), status_of(KeyboardInterrupt())
        (143, 130)
    """
    return 128 + int(getattr(stop, "signal_number", signal.SIGINT))


class Interrupt:
    """Context manager that handles the signals which end a run. Outside the main thread it sets no signal handler.

    Args:
        same_within: the number of seconds within which a second signal is treated as a repeat of the first.
        insists: whether a second thread ends the process if the main thread is stuck in native code.
        speaks: whether messages are logged and printed. It should be True in only one process of a run.
    """

    def __init__(self, *, same_within: float = SAME_SECONDS, insists: bool = False, speaks: bool = True) -> None:
        self.requested = False
        self.began = False
        """True once there is training progress that an immediate end would lose."""
        self.has_trainer = False
        """True once a trainer has taken over and will call `begin`."""
        self.defers = False
        """True while the first signal is only recorded and ends nothing by itself."""
        self.at_once = False
        """True once a signal has raised an exception in the middle of the current work."""
        self.is_quiet: Callable[[], bool] = bool
        """A function that returns True if another process reports why this process ends."""
        self.wants_requeue = False
        """True after SIGUSR1, which a scheduler sends before the time limit to a job that is to be continued later."""
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
            # A handler that the program installed itself is left in place, and so is SIG_IGN.
            for number, usual in _DEFAULT_HANDLERS.items():
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
        """Removes the handlers in a forked child process, so that signals have their default effect in the child."""
        # The pipe is shared with the parent: a signal to the child would wake the parent's thread.
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
        self._restore()

    def begin(self) -> None:
        """Records that training has begun: from now on, the first signal is recorded and the step is completed."""
        self.began = self.defers = True

    @property
    def error(self) -> KeyboardInterrupt:
        """The exception to raise at the end of the step that received a signal."""
        return KeyboardInterrupt() if self._number == signal.SIGINT else Terminated()

    @property
    def stop_code(self) -> float:
        """The code of the signal that was received, or 0 without a signal.

        The processes of a run sum their codes with an all-reduce. The sum shows which signals any of them has received.
        """
        return _STOP_CODES[self._number] if self.requested else 0.0

    def error_for(self, stop_codes: float) -> KeyboardInterrupt | None:
        """Returns the exception to raise for the sum of all `stop_code`s, or None if no process received a signal."""
        if stop_codes < _STOP_CODES[signal.SIGINT]:
            return None
        self.wants_requeue |= stop_codes >= _STOP_CODES[signal.SIGUSR1]
        return Terminated() if stop_codes >= _STOP_CODES[signal.SIGTERM] else KeyboardInterrupt()

    def request(self) -> KeyboardInterrupt:
        """Records a request to stop, as the first Ctrl-C does, and returns the exception to raise.

        A signal that follows ends the run at once.
        """
        self.requested, self._number = True, signal.SIGINT
        return self.error

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Writing to a terminal that is gone raises OSError, which would end the save.
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
        # The handler can run in the middle of a write to the same stream, and a buffered stream is not reentrant.
        with suppress(RuntimeError):
            if self.speaks:
                import logging  # a trainer has loaded it already; commands without one save the import

                logging.getLogger(__name__).warning("stopping; %s to stop at once", again)

    def _listen(self) -> None:
        """Starts a second thread that receives signals: Python runs handlers only after native code has returned."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        # The interpreter writes the signal's number to the descriptor from the C handler, even while native code runs.
        self._wakeup = (reading, writing, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        threading.Thread(target=self._watch_signals, args=(reading,), name=LISTENER, daemon=True).start()

    def _watch_signals(self, reading: int) -> None:
        num_signals = 0
        first = 0.0
        while number := os.read(reading, 1):
            # torchrun's agent replaces these handlers with its own; then the signal is its business.
            if number[0] not in self._previous or signal.getsignal(number[0]) != self._remember:
                continue
            if num_signals and time.monotonic() - first < self.same_within:
                continue
            num_signals, first = num_signals + 1, time.monotonic()
            if self.defers and num_signals < 2:
                continue
            # The main thread gets time to react by itself first: it raises, saves and cleans up.
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
        # sys.exit would only raise in this thread, and the main thread is stuck.
        os._exit(130 if number == signal.SIGINT else STATUS)


def _leave_terminal() -> None:
    """Redirects each closed standard stream to the null device, because a failed write to it would end the save."""
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
        if error.args[0] != errno.ENOTTY:  # a terminal that was hung up
            return True
    except OSError:
        return False
    events = select.poll()
    events.register(stream, 0)
    return stream > 0 and any(event & select.POLLERR for _, event in events.poll(0))  # a pipe without a reader


_active: list[Interrupt] = []
_program_handlers: list[Interrupt] = []


def _in_child() -> None:
    for interrupt in _active:
        interrupt.forget()
    _active.clear()
    _program_handlers.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def _ended_by(interrupt: Interrupt) -> Iterator[None]:
    """Context manager that raises the exception of the signal if native code has replaced it with another one."""
    try:
        yield
    except Exception as error:
        if interrupt.at_once:
            raise interrupt.error from error
        raise


@contextmanager
def handle_signals(interrupt: Interrupt) -> Iterator[Interrupt]:
    """Context manager that handles the signals of a whole program. Inside it, `signal_handler` yields this handler."""
    with interrupt, _ended_by(interrupt):
        _program_handlers.append(interrupt)
        try:
            yield interrupt
        finally:
            _program_handlers.remove(interrupt)


@contextmanager
def signal_handler(*, same_within: float = SAME_SECONDS, speaks: bool = True) -> Iterator[Interrupt]:
    """Context manager that yields the handler of the program. If there is none, it makes an `Interrupt` for the block.

    Args:
        same_within: the argument `same_within` of the new `Interrupt`.
        speaks: the argument `speaks` of the new `Interrupt`.
    """
    if not _program_handlers:
        with Interrupt(same_within=same_within, speaks=speaks) as own, _ended_by(own):
            yield own
        return
    interrupt = _program_handlers[-1]
    interrupt.has_trainer = True
    try:
        with _ended_by(interrupt):
            yield interrupt
    finally:
        interrupt.defers = False


def current_handler() -> Interrupt | None:
    """Returns the handler that `handle_signals` set, or None. A handler that `signal_handler` made is not returned."""
    return _program_handlers[-1] if _program_handlers else None


def ignore_signals() -> None:
    """Makes this process, which has done its work and is about to end, ignore SIGTERM, SIGUSR1 and SIGHUP."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def end_promptly(status: int) -> None:
    """Ends this process after its `atexit` handlers have run, without the interpreter's teardown.

    The function must be registered with `atexit`. There are two reasons to skip the teardown. Other processes would
    wait for it for seconds. A thread of a process group may also release a tensor during the teardown; it then needs
    the interpreter's lock, and the process is aborted.

    Args:
        status: the exit status of the process.
    """
    # _run_exitfuncs would call this function again.
    atexit.unregister(end_promptly)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def leave_to_parent() -> None:
    """Makes a forked worker process ignore all signals except a SIGTERM of its parent.

    Ctrl-C reaches every process of a terminal, and a scheduler signals every process of a job. If a worker process
    ended by such a signal, the training step that the parent is about to complete would fail.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # sigwaitinfo, which reports the sender, needs the signal to be blocked in every thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_by_parent, args=(os.getppid(),), name=LISTENER, daemon=True).start()


def _end_by_parent(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if sender == parent or os.getppid() != parent:
            os._exit(0)
