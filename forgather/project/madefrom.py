"""What a rendered text was made from, for facts that are kept.

Takes a rendered text and the search path it was made with, gives `Dependencies`. Keeps true: None rather than half
of the truth, where a template may change its mind without any known file changing.
"""

from __future__ import annotations

import os
import re

from forgather.cache_file import Digests
from forgather.config.rendered import RenderedText
from forgather.project.kept import Dependencies

# A template that looks for one of several names may change its mind when a file appears that was never asked for.
_LOOKS_AROUND = re.compile(r"ignore\s+missing|\b(?:include|extends|import|from)\s*[\[(]")


def made_from(rendered: RenderedText, searchpath: tuple[str, ...]) -> Dependencies | None:
    """Returns what a text depends on; None where that cannot be told."""
    if any(_LOOKS_AROUND.search(source.text) for source in rendered.sources.values()):
        return None
    digest = Digests()
    files = {file: digest(file) for file in rendered.sources if os.path.isabs(file)}
    sound = {file: value for file, value in files.items() if value is not None}
    if len(sound) != len(files):
        return None
    env = {name: os.environ.get(name) for name in rendered.env_reads}
    return Dependencies(files=sound, absent=_absent(rendered, searchpath), env=env)


def _absent(rendered: RenderedText, searchpath: tuple[str, ...]) -> tuple[str, ...]:
    absent: list[str] = []
    for use in rendered.templates:
        for folder in searchpath:
            candidate = os.path.join(folder, use.name)
            if candidate == use.file:
                break
            if not os.path.lexists(candidate):
                absent.append(candidate)
    return tuple(dict.fromkeys(absent))
