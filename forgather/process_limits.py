"""Operating system limits on CPU time and memory while a config is read, in addition to the rendering and loading
budgets.

Only `fgcli` enables the limits, in its own process. They are in force while a config is read, unless another thread
runs in the process, and the previous limits are restored afterwards. A system without such limits reads configs without
limits.
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
"""Units: bytes. The largest amount by which reading a config may extend the address space."""
CPU_SECONDS = 10
"""Units: seconds. The processor time that reading one config may take."""
LISTENER = "forgather-signals"
"""The name of the thread that handles signals; it only waits, so it does not count as another thread."""
_HINT = "make the config smaller: keep data in files of its own, and compute large values in Python"


class _Switch:
    """Whether the limits are enabled, and whether a config is being read."""

    is_on = False
    is_reading = False


@contextmanager
def limits_on() -> Iterator[None]:
    """Context manager that enables the limits. Commands use it; a program that imports Forgather is not limited."""
    _Switch.is_on = True
    try:
        yield
    finally:
        _Switch.is_on = False


@contextmanager
def limits_while_reading(config: str, file: Callable[[], str | None]) -> Iterator[None]:
    """Context manager that applies the limits while a config is read, if they are enabled.

    Args:
        config: the name of the config, for the error message.
        file: a function that returns the path of the config's file, for the place of the error.

    Raises:
        BudgetError: FG127 if a limit of the operating system was reached.
    """
    # A config that reads another one is under the limits already, and other threads must not be limited.
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
    # The signal handler that raises FG127 does not know the file.
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
    """Returns whether another thread would share the limits."""
    # A process that has not imported `threading` has one thread; the import would cost time for the question.
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return False
    quiet = (threading.main_thread(), *(thread for thread in threading.enumerate() if thread.name == LISTENER))
    return any(thread not in quiet for thread in threading.enumerate())


class _Limits:
    """Context manager that sets soft limits of this process and restores the previous ones at the end."""

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
            # The default action of SIGXCPU ends the process without a message.
            self._handler = signal.signal(signal.SIGXCPU, self._stop)
        except ValueError:
            # signal.signal works in the main thread only.
            return
        # The limit counts from the start of the process, so the time that is already used is added.
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
        # A limit that an administrator set lower stays.
        if soft == resource.RLIM_INFINITY or wanted < soft:
            with suppress(OSError, ValueError):
                resource.setrlimit(kind, (wanted, hard))
                self._before.append((kind, (soft, hard)))

    def _stop(self, *_: object) -> NoReturn:
        message = f"reading the config {self._config!r} takes more than {CPU_SECONDS} seconds of processor time"
        raise BudgetError(message, code="FG127", hint=_HINT)


def _address_space(page_bytes: int) -> int | None:
    """Returns the size of the address space of this process, in bytes; None on systems without /proc."""
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[0]) * page_bytes
    except (OSError, ValueError, IndexError):
        return None
