"""Folders for the records of runs.

`own_run_folder` gives a path below `runs` that no other run has. It creates no folder, and gives no path twice within
one process.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

_given: set[Path] = set()


def own_run_folder(output_dir: str | Path) -> Path:
    """Returns `<output_dir>/runs/<utc time>`, with `-2` or the next free number if another run has it."""
    began = Path(output_dir, "runs", f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    numbered = (began.with_name(f"{began.name}-{number}") for number in itertools.count(2))
    folder = next(
        path for path in itertools.chain([began], numbered) if path.absolute() not in _given and not path.exists()
    )
    _given.add(folder.absolute())
    return folder
