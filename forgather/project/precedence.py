"""Which of two settings was written nearer to the config.

Takes the templates of a config, gives whether a setting stands although another one takes its effect. Keeps true: what
the library writes is a default, and what a parent writes is one for a child that decides otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from forgather.config.graph import Entry
from forgather.source import Origin

_GIVEN = -1
_UNKNOWN = 1_000_000


class Precedence:
    """The templates of a config, nearest first.

    Args:
        project_dir: folder of the user's own templates.
        files: files of the templates in the order in which they were loaded, the config first.
    """

    def __init__(self, project_dir: str, files: Iterable[str]) -> None:
        self._own = os.path.join(project_dir, "")
        self._ranks: dict[str, int] = {}
        for rank, file in enumerate(files):
            self._ranks.setdefault(file, rank)

    def stands(self, setting: Entry, other: Entry | None, *, given_only: bool = False) -> bool:
        """Returns whether the user wrote a setting, and nothing nearer to the config what goes against it.

        Args:
            setting: the setting that may be without effect.
            other: what takes its effect; None for a default.
            given_only: True where only what an option of the command line gives counts as nearer.
        """
        if setting.origin is None or not setting.origin.span.file.startswith((self._own, "<")):
            return False
        theirs = self._rank(other)
        return theirs != _GIVEN if given_only else self._rank(setting) <= theirs

    def is_nearer(self, setting: Entry, other: Entry) -> bool:
        """Returns whether a setting was written nearer to the config than another one."""
        return self._rank(setting) < self._rank(other)

    def _rank(self, entry: Entry | None) -> int:
        if entry is None:
            return _UNKNOWN
        return min(self._rank_of(entry.origin), self._rank_of(entry.value.origin))

    def _rank_of(self, origin: Origin | None) -> int:
        if origin is None:
            return _UNKNOWN
        if any(site.span.file.startswith("<") for site in (*origin.sites, *origin.sets)):
            return _GIVEN
        return min(self._ranks.get(site.span.file, _UNKNOWN) for site in origin.sites)
