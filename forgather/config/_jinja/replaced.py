"""Blocks that replace those of their parents by less than was meant.

Takes a template and those that it extends, gives findings. Keeps true: a block that brings a constructor, an include
or other keys of its own is a whole replacement, and no mistake.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from forgather.config._jinja.environment import LoadedTemplate, RunEnvironment
from forgather.config._jinja.holdings import Holding, text_holding
from forgather.config._jinja.loader import read_text
from forgather.config._jinja.unread import is_field_read, is_own
from forgather.errors import Diagnostic, ForgatherError, Severity

_ENOUGH = 3
_SHOWN = 3
_PLAIN = ("", "!dlist", "!dict")


def replaced_blocks(
    template: LoadedTemplate, parents: Sequence[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields a finding for each block of a project's template that loses what its parents' block holds."""
    if not is_own(template, environment.globals.get("project_dir")):
        return
    for name, (line, _) in template.namespace["fg_blocks"].items():
        own = _held(template, name)
        if own is None or own.calls_super or own.includes or "\0" in own.opening:
            continue
        above, source = _above(name, parents, environment)
        found = _lost_keys(name, own, above) or _lost_sets(name, own, above, template, environment)
        if source and found:
            severity, message, hint = found
            yield Diagnostic(
                code="FG137",
                message=message,
                severity=severity,
                span=template.definition.span(line),
                hint=hint,
                context=(environment.library.story(template.use),),
            )


Found = tuple[Severity, str, str]


def _lost_keys(name: str, own: Holding, above: Holding) -> Found | None:
    lost = [key for key in above.keys if key not in own.keys]
    if not own.keys or len(lost) < _ENOUGH:
        return None
    if not own.opening.startswith("!") and len(lost) < len(above.keys):
        message = f"[{name}] drops {len(lost)} settings of its parent ({_listed(lost)})"
        hint = "did you mean to keep them? Begin the block with `== super()`; to replace them all, write them out"
        return Severity.WARNING, message, hint
    if len(lost) == len(above.keys) and _shape(own) in _PLAIN:
        message = f"[{name}] replaces the {len(lost)} entries of its parent ({_listed(lost)})"
        return Severity.LINT, message, "to keep them, begin the block with `== super()`"
    return None


def _shape(held: Holding) -> str:
    """Returns the tag at the head of a block without the name of the object; "" for a plain mapping."""
    if not held.opening.startswith("!"):
        return ""
    return held.opening.split(":@")[0].split("@")[0]


def _lost_sets(
    name: str, own: Holding, above: Holding, template: LoadedTemplate, environment: RunEnvironment
) -> Found | None:
    if own.opening:
        return None
    written = template.namespace["fg_written"]
    lost = [
        f"{base}.{field}"
        for base, field in above.sets
        if field not in written and is_field_read(base, field, environment)
    ]
    if not lost:
        return None
    message = f"[{name}] drops what its parent sets and templates read: {_listed(lost)}"
    return Severity.WARNING, message, "did you mean to keep it? Begin the block with `== super()`"


def _above(name: str, parents: Sequence[LoadedTemplate], environment: RunEnvironment) -> tuple[Holding, bool]:
    """Returns what the block of that name holds in the parents, and whether any of them has it."""
    keys: dict[str, None] = {}
    sets: dict[tuple[str, str], None] = {}
    opening, met = "", False
    for parent in parents:
        held = _held(parent, name)
        if held is None:
            continue
        met = True
        parts = [held, *(_included(included, environment) for included in held.includes)]
        for part in reversed(parts):
            keys.update(dict.fromkeys(part.keys))
            opening = part.opening if part.opening.startswith("!") else opening or part.opening
        sets.update(dict.fromkeys(held.sets))
        if not held.calls_super:
            break
    return Holding(keys=tuple(keys), opening=opening, sets=tuple(sets)), met


def _held(template: LoadedTemplate, name: str) -> Holding | None:
    found = next((held for block, held in template.namespace["fg_held"] if block == name), None)
    return None if found is None else Holding(*found)


def _included(name: str, environment: RunEnvironment) -> Holding:
    """Returns what a template holds that a replaced block would have included."""
    if inline := environment.library.inline.get(name):
        return text_holding(inline[0].text)
    path = environment.library.on_search_path(name) if name and not os.path.isabs(name) else None
    try:
        return text_holding(read_text(path)) if path else Holding()
    except ForgatherError:
        return Holding()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
