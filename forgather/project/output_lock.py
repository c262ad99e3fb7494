"""One run at a time in an output folder.

Takes the folder, gives a context in which no other run has it. Keeps true: the lock belongs to the process and
ends with it, however it ends; nothing that a run has written is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from forgather.errors import ProjectError

LOCK_FILE = ".lock"


@contextmanager
def alone_in(output_dir: str) -> Iterator[None]:
    """Holds `<output_dir>/runs/.lock` while the block runs.

    Raises:
        ProjectError: FG420, another run has the folder.
    """
    from filelock import FileLock, Timeout  # here: static commands do without it

    folder = os.path.join(output_dir, "runs")
    lock = FileLock(os.path.join(folder, LOCK_FILE), timeout=0)
    try:
        os.makedirs(folder, exist_ok=True)
        lock.acquire()
    except OSError as error:
        if isinstance(error, Timeout):
            raise _taken(output_dir) from None
        # Where nothing can be written, the run folder cannot be made: that error names the setting.
    try:
        yield
    finally:
        lock.release()


def _taken(output_dir: str) -> ProjectError:
    return ProjectError(
        f"another run is writing to {output_dir}",
        code="FG420",
        hint="wait until it has ended, or give this one a folder of its own: --output-dir DIR",
    )
