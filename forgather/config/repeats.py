"""Repeated keys: is the second an override, a slip, or a mistake?

Takes two entries of one key and the chain of templates, gives a verdict. Keeps true: the rule of the
language on repeated keys. A key's writer chain is its origin's sites; two chains are compared from the
outermost site, and the first difference of template or block makes the later key an override.
"""

from __future__ import annotations

from enum import StrEnum

from forgather.config.equality import same_value
from forgather.config.graph import Entry
from forgather.source import Origin


class Verdict(StrEnum):
    """What a repeated key is."""

    OVERRIDE = "override"
    BURIED = "buried"
    SAME = "same"
    UNSURE = "unsure"
    CONFLICT = "conflict"


def judge(earlier: Entry, later: Entry, chain: tuple[str, ...]) -> Verdict:
    """Returns what the later of two entries of one key is to the earlier one.

    Args:
        earlier: the entry met first.
        later: the entry met second.
        chain: the config and the templates it extends, nearest first.
    """
    a, b = earlier.origin, later.origin
    difference = _first_difference(a, b) if a and b else None
    if difference is not None:
        ours, theirs = difference
        buried = ours in chain and theirs in chain and chain.index(ours) < chain.index(theirs)
        return Verdict.BURIED if buried else Verdict.OVERRIDE
    if (a and a.approximate) or (b and b.approximate):
        return Verdict.UNSURE
    return Verdict.SAME if same_value(earlier.value, later.value) else Verdict.CONFLICT


def _first_difference(a: Origin, b: Origin) -> tuple[str, str] | None:
    """Returns the two templates at the first site that differs by template or block; None without one.

    A chain that ends goes on with its last line: text printed by a macro of the same block of the same
    template is that block's text.
    """
    for position in range(max(len(a.sites), len(b.sites))):
        ours, theirs = a.sites[min(position, len(a.sites) - 1)], b.sites[min(position, len(b.sites) - 1)]
        if (ours.template, ours.block) != (theirs.template, theirs.block):
            return ours.template, theirs.template
    return None
