"""A folder for the records of a run that nobody named one for.

Takes an output folder; gives a path below its `runs` that no other run has. Keeps true: nothing is made here, and
one process gives no path twice.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

_given: set[Path] = set()


def own_run_folder(output_dir: str | Path) -> Path:
    """Returns `<output_dir>/runs/<utc time>`; where another run has it, with `-2` or the next number that is free."""
    began = Path(output_dir, "runs", f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    numbered = (began.with_name(f"{began.name}-{number}") for number in itertools.count(2))
    folder = next(
        path for path in itertools.chain([began], numbered) if path.absolute() not in _given and not path.exists()
    )
    _given.add(folder.absolute())
    return folder
