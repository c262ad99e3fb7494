"""Repeated keys: is the second an override, a slip, or a mistake?

Takes two entries of one key and which template extends which, gives a verdict. Keeps true: the rule of the
language on repeated keys. A key's writer chain is its origin's sites; two chains are compared from the
outermost site, and the first difference of template or block makes the later key an override. Sub-templates
of one name in two files are two templates.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from enum import StrEnum

from forgather.config.equality import same_value
from forgather.config.graph import Entry
from forgather.source import Origin, Site

Template = tuple[str, str]


class Verdict(StrEnum):
    """What a repeated key is."""

    OVERRIDE = "override"
    BURIED = "buried"
    SAME = "same"
    UNSURE = "unsure"
    CONFLICT = "conflict"


def judge(earlier: Entry, later: Entry, descents: AbstractSet[tuple[Template, Template]]) -> Verdict:
    """Returns what the later of two entries of one key is to the earlier one.

    Args:
        earlier: the entry met first.
        later: the entry met second.
        descents: pairs of a template and one that it extends, directly or not; a template is its file and name.
    """
    a, b = earlier.origin, later.origin
    difference = _first_difference(a, b) if a and b else None
    if difference is not None:
        return Verdict.BURIED if difference in descents else Verdict.OVERRIDE
    if (a and a.approximate) or (b and b.approximate):
        return Verdict.UNSURE
    return Verdict.SAME if same_value(earlier.value, later.value) else Verdict.CONFLICT


def _first_difference(a: Origin, b: Origin) -> tuple[Template, Template] | None:
    """Returns the two templates at the first site that differs by template or block; None without one.

    A chain that ends goes on with its last line: text printed by a macro of the same block of the same
    template is that block's text.
    """
    for position in range(max(len(a.sites), len(b.sites))):
        ours, theirs = a.sites[min(position, len(a.sites) - 1)], b.sites[min(position, len(b.sites) - 1)]
        if template_of(ours) != template_of(theirs) or ours.block != theirs.block:
            return template_of(ours), template_of(theirs)
    return None


def template_of(site: Site) -> Template:
    """Returns the template that a line is written in."""
    return site.span.file, site.template
