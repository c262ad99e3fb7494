"""The two sides of a comparison, from the words of the command line.

Takes one or two words, gives two `Compared`. Keeps true: a word that is the name of a config is that config, whatever
signs are in it; the machinery of Git is loaded for a revision only.
"""

from __future__ import annotations

import os
from datetime import datetime

from forgather.errors import ForgatherError
from forgather.project.compared import Compared, named_config, open_config


def open_sides(a: str | None, b: str | None, config: str | None, folder: str | None) -> tuple[Compared, Compared]:
    """Returns both sides.

    Args:
        a: a config, its file, or `CONFIG@REVISION`; None for the config that `-t` names, at its last commit.
        b: the same; None for what `a` is now.
        config: the config that a bare `@REVISION` means; None for the default.
        folder: the project that names are relative to; None for the nearest above the working folder.

    Raises:
        ForgatherError: one of them cannot be opened.
    """
    now = datetime.now()
    name, revision = split_revision(a or "", folder)
    name = name or config or ""
    if b is None:
        return _opened(name, "HEAD" if revision is None else revision, folder, now), _opened(name, None, folder, now)
    other, other_revision = split_revision(b, folder)
    old = _opened(name, revision, folder, now)
    return old, _opened(other or name, other_revision, folder, now)


def split_revision(word: str, folder: str | None) -> tuple[str, str | None]:
    """Returns the config and the revision of `CONFIG@REVISION`; the revision is None where there is none.

    Example:
        >>> split_revision("tiny@HEAD~3", None)
        ('tiny', 'HEAD~3')
    """
    if "@" not in word or os.path.exists(word):
        return word, None
    try:
        named_config(word, folder)
    except ForgatherError:
        name, _, revision = word.partition("@")
        return name, revision
    return word, None


def _opened(word: str, revision: str | None, folder: str | None, now: datetime) -> Compared:
    if revision is None:
        return open_config(*named_config(word, folder), now)
    from forgather.project.revision import open_revision

    return open_revision(word, revision, folder, now)
