"""Limits of the operating system around the reading of a config: the floor under all budgets.

Takes a config's name and file, gives an error at that place where the system stops the reading. Keeps true: nothing is
limited unless `fgcli` asks for it in its own process; limits hold in the main thread, where there are no other threads,
while one config is read, and are put back before anything else happens; a system without limits reads as before.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from forgather.errors import BudgetError
from forgather.source import Span

MEMORY_BYTES = 400_000_000
CPU_SECONDS = 10
LISTENER = "forgather-signals"
"""The thread that hears signals beside the main thread: it waits, and needs no memory."""
_HINT = "make the config smaller: keep data in files of its own, and compute large values in Python"


class _Switch:
    """Whether configs are read under limits, and whether one is being read."""

    is_on = False
    is_reading = False


@contextmanager
def limits_on() -> Iterator[None]:
    """Has configs read under limits; for the process of a command, which belongs to no other program."""
    _Switch.is_on = True
    try:
        yield
    finally:
        _Switch.is_on = False


@contextmanager
def reading(config: str, file: Callable[[], str | None]) -> Iterator[None]:
    """Reads a config under the limits that are on.

    Args:
        config: its name, for the error.
        file: gives its file, for the place of the error.

    Raises:
        BudgetError: FG127, the system stopped the reading.
    """
    if not _Switch.is_on or _Switch.is_reading or _has_threads():
        yield
        return
    _Switch.is_reading = True
    try:
        with _Limits(config):
            yield
    except MemoryError:
        message = f"reading the config {config!r} takes more than {MEMORY_BYTES // 10**6} MB of memory"
        raise BudgetError(message, code="FG127", span=_place(file), hint=_HINT) from None
    except BudgetError as error:
        if error.code == "FG127":
            error.span = error.span or _place(file)
        raise
    finally:
        _Switch.is_reading = False


def _place(file: Callable[[], str | None]) -> Span | None:
    path = file()
    return Span(path, 1) if path else None


def _has_threads() -> bool:
    """Says whether another thread would share the limits; `threading` is not imported for the question."""
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return False
    quiet = (threading.main_thread(), *(thread for thread in threading.enumerate() if thread.name == LISTENER))
    return any(thread not in quiet for thread in threading.enumerate())


class _Limits:
    """Soft limits of this process, put back at the end."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._before: list[tuple[int, tuple[int, int]]] = []
        self._handler: Any = None

    def __enter__(self) -> None:
        try:
            import resource
        except ImportError:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        try:
            self._handler = signal.signal(signal.SIGXCPU, self._stop)
        except ValueError:
            # Python hears signals in the main thread alone.
            return
        seconds = int(usage.ru_utime + usage.ru_stime) + 1 + CPU_SECONDS
        self._set(resource.RLIMIT_CPU, seconds)
        used = _address_space(resource.getpagesize())
        if used is not None:
            self._set(resource.RLIMIT_AS, used + MEMORY_BYTES)

    def __exit__(self, *_: object) -> None:
        if self._before:
            import resource

            for kind, limits in self._before:
                resource.setrlimit(kind, limits)
        if self._handler is not None:
            signal.signal(signal.SIGXCPU, self._handler)

    def _set(self, kind: int, wanted: int) -> None:
        import resource

        soft, hard = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY or wanted < soft:
            with suppress(OSError, ValueError):
                resource.setrlimit(kind, (wanted, hard))
                self._before.append((kind, (soft, hard)))

    def _stop(self, *_: object) -> NoReturn:
        message = f"reading the config {self._config!r} takes more than {CPU_SECONDS} seconds of the processor"
        raise BudgetError(message, code="FG127", hint=_HINT)


def _address_space(page_bytes: int) -> int | None:
    """Returns the size of this process; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[0]) * page_bytes
    except (OSError, ValueError, IndexError):
        return None
