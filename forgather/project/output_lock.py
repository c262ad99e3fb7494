"""The lock of an output folder, so that only one run at a time uses the folder.

The lock belongs to the process, and the operating system releases it when the process ends for any reason. Files of a
run are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from forgather.errors import ProjectError

LOCK_FILE = ".lock"


@contextmanager
def output_folder_lock(output_dir: str) -> Iterator[None]:
    """Context manager that holds the lock `<output_dir>/runs/.lock`.

    Raises:
        ProjectError: FG420 if another run uses the folder.
    """
    from filelock import FileLock, Timeout  # a late import: commands that only read do not need it

    folder = os.path.join(output_dir, "runs")
    lock = FileLock(os.path.join(folder, LOCK_FILE), timeout=0)
    try:
        os.makedirs(folder, exist_ok=True)
        lock.acquire()
    except OSError as error:
        # `Timeout` of filelock is an OSError.
        if isinstance(error, Timeout):
            raise _taken_error(output_dir) from None
        # If nothing can be written here, creating the run folder fails next, with an error that names the setting.
    try:
        yield
    finally:
        lock.release()


def _taken_error(output_dir: str) -> ProjectError:
    return ProjectError(
        f"another run is writing to {output_dir}",
        code="FG420",
        hint="wait until it has ended, or give this one a folder of its own: --output-dir DIR",
    )
