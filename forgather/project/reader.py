"""The reader of signatures for one project.

Takes a project's facts, gives a `Reader`. Keeps true: whoever reads signatures for a project looks in the same folders
and keeps what it found in the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forgather.project.locations import cache_dir
from forgather.project.metadata import ProjectMeta

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader


def reader_for(meta: ProjectMeta) -> Reader:
    """Returns a reader of signatures for what a project names."""
    from forgather.signatures.reader import Reader

    return Reader(meta.project_dir, system_path=meta.system_path, cache_dir=cache_dir("signatures"))
