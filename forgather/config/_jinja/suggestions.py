"""Names that are near to one that a template misspells.

Takes the frames of templates that an error passed through, gives hints. Keeps true: only names that the failing
line could have used are suggested.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.runtime import Macro
from jinja2.utils import missing

from forgather.config._jinja.environment import LoadedTemplate
from forgather.config._jinja.loader import Library
from forgather.config._jinja.runtime_types import TracedNamespace
from forgather.errors import nearest
from forgather.spelling import close_matches

Frames = list[tuple[LoadedTemplate, int, dict[str, Any]]]
"""Templates, their lines and their local names, outermost first."""

_LOCAL = re.compile(r"l_\d+_(.*)", re.S)
_EXPORT = re.compile(r"^[ \t]*(?:--|<<|>>|\{%[-+]?)[ \t]*(?:macro|set)[ \t]+(\w+)", re.M)
_NO_ARGUMENT = re.compile(r"macro '(.*)' takes no keyword argument '(.*)'")


def near_variable(name: str, frames: Frames) -> str:
    """Returns what to do about a variable that is not defined."""
    if close_matches(name, ["super"], cutoff=0.8):
        return "did you mean 'super'?"
    known = {seen for seen in _visible(frames) if seen not in DEFAULT_NAMESPACE}
    known -= {"super", "self", "caller", "varargs", "kwargs"}
    return _close(name, sorted(known)) or f"set it before it is read, or give a default: `{name} | default(...)`"


def near_attribute(name: str, frames: Frames) -> str | None:
    """Returns the nearest attribute of a namespace."""
    spaces = [value for value in _visible(frames).values() if isinstance(value, TracedNamespace)]
    return _close(name, sorted({attribute for space in spaces for attribute in space._Namespace__attrs}))


def near_argument(message: str, frames: Frames) -> str | None:
    """Returns the nearest parameter, where a message says that a macro was called with one that it does not have."""
    match = _NO_ARGUMENT.match(message)
    if match is None:
        return None
    macros = [value for value in _visible(frames).values() if isinstance(value, Macro) and value.name == match[1]]
    return nearest(match[2], macros[0].arguments) if macros else "see the parameters behind the name of the macro"


def near_export(name: str, template: str, library: Library) -> str | None:
    """Returns the nearest macro or variable of a template that is imported."""
    texts = [found.text for found in library.used if found.name == template]
    return nearest(name, [exported for text in texts for exported in _EXPORT.findall(text)])


def _close(name: str, known: list[str]) -> str | None:
    hint = nearest(name, known)
    return hint if hint and hint.startswith("did") else None


def _visible(frames: Frames) -> dict[str, Any]:
    """Returns the names that the failing line sees, with their values."""
    if not frames:
        return {}
    local = frames[-1][2]
    context = local.get("context")
    seen = dict(context.get_all()) if context is not None else {}
    for key, value in local.items():
        if (match := _LOCAL.fullmatch(key)) and value is not missing:
            seen[match[1]] = value
    return seen
