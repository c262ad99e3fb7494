"""The reader of signatures for a project.

All parts of Forgather that read signatures for a project call `reader_for`, so that they search the same folders and
share one cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forgather.project.locations import cache_dir
from forgather.project.metadata import ProjectMeta

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader


def reader_for(meta: ProjectMeta) -> Reader:
    """Returns a reader of the signatures of the constructors that a project's configs can name."""
    from forgather.signatures.reader import Reader

    return Reader(meta.project_dir, system_path=meta.system_path, cache_dir=cache_dir("signatures"))
