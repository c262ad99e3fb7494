"""The precedence of settings: which of two was written closer to the config.

Takes the templates of a config; gives whether a setting counts although another one overrides its effect. A value of
the library is a default, and a value of a parent template is a default for a child that sets something else.
`without_duplicate_settings` applies this to two names of one setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from forgather.config.graph import Entry
from forgather.source import Origin

_GIVEN = -1
_UNKNOWN = 1_000_000


class Precedence:
    """The order of the templates of a config, the closest first.

    Args:
        project_dir: the folder of the user's own templates.
        files: files of the templates in the order of loading, the config first.
    """

    def __init__(self, project_dir: str, files: Iterable[str]) -> None:
        self._own = os.path.join(project_dir, "")
        self._ranks: dict[str, int] = {}
        for rank, file in enumerate(files):
            self._ranks.setdefault(file, rank)

    def takes_effect(self, setting: Entry, other: Entry | None, *, given_only: bool = False) -> bool:
        """Returns whether the user wrote a setting, and nothing closer to the config contradicts it.

        Args:
            setting: the setting that may have no effect.
            other: the setting that overrides it; None for a default.
            given_only: whether only an option of the command line counts as closer.
        """
        if setting.origin is None or not setting.origin.span.file.startswith((self._own, "<")):
            return False
        theirs = self._rank(other)
        return theirs != _GIVEN if given_only else self._rank(setting) <= theirs

    def is_nearer(self, setting: Entry, other: Entry) -> bool:
        """Returns whether a setting was written closer to the config than another one."""
        return self._rank(setting) < self._rank(other)

    def _rank(self, entry: Entry | None) -> int:
        if entry is None:
            return _UNKNOWN
        return min(self._rank_of(entry.origin), self._rank_of(entry.value.origin))

    def _rank_of(self, origin: Origin | None) -> int:
        if origin is None:
            return _UNKNOWN
        # A pseudo file is the command line, which is closer than any template.
        if any(site.span.file.startswith("<") for site in (*origin.sites, *origin.sets)):
            return _GIVEN
        return min(self._ranks.get(site.span.file, _UNKNOWN) for site in origin.sites)
