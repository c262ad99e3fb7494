"""The folder names for the records of runs.

`own_run_folder` returns a path in the folder `runs` that no other run uses. It does not create the folder, and it never
returns the same path twice within one process.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

# The caller creates the folder later, so `exists` alone could not keep two runs of one process apart.
_given: set[Path] = set()


def own_run_folder(output_dir: str | Path) -> Path:
    """Returns the path `<output_dir>/runs/<utc time>`. If that path is in use, `-2` or the next number is added."""
    began = Path(output_dir, "runs", f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    numbered = (began.with_name(f"{began.name}-{number}") for number in itertools.count(2))
    folder = next(
        path for path in itertools.chain([began], numbered) if path.absolute() not in _given and not path.exists()
    )
    _given.add(folder.absolute())
    return folder
