"""Duplicate keys of a mapping: an override, a redundant line, or an error.

The inputs are two entries of one key, and the pairs of templates of which one extends the other; the output is a
verdict and findings. The rule: the writer chain of a key is the list of sites in its origin. Two chains are compared
from the outermost site; if they differ in a template or a block, the later key is an override. Sub-templates of one
name in two files are two templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum

from forgather.config.equality import same_value
from forgather.config.graph import Entry, Node, Scalar
from forgather.config.yaml.events import Event
from forgather.config.yaml.source_positions import SourcePositions, Template, template_of
from forgather.errors import Diagnostic, Severity
from forgather.source import Origin


class KeyVerdict(StrEnum):
    """The relation of the later of two equal keys to the earlier one.

    OVERRIDE: the later line, of another template or block, replaces the earlier one. BURIED: the line of a child
    template comes before that of its parent, which replaces it. SAME: one block gives the same value twice. UNSURE: an
    origin is approximate, so the blocks are not known. CONFLICT: one block gives two values.
    """

    OVERRIDE = "override"
    BURIED = "buried"
    SAME = "same"
    UNSURE = "unsure"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Two entries with the same key, and the relation of the later one to the earlier one."""

    earlier: Entry
    later: Entry
    verdict: KeyVerdict


def verdict_on(earlier: Entry, later: Entry, descents: AbstractSet[tuple[Template, Template]]) -> KeyVerdict:
    """Returns the relation of two entries of one key.

    Args:
        earlier: the entry that comes first in the document.
        later: the entry that comes second.
        descents: the pairs of a template and a template that it extends, directly or through others. A template is
            given by its file and its name.
    """
    a, b = earlier.origin, later.origin
    # Nodes without an origin are made in Python and have no writer chain.
    difference = _first_difference(a, b) if a and b else None
    if difference is not None:
        return KeyVerdict.BURIED if difference in descents else KeyVerdict.OVERRIDE
    if (a and a.approximate) or (b and b.approximate):
        return KeyVerdict.UNSURE
    return KeyVerdict.SAME if same_value(earlier.value, later.value) else KeyVerdict.CONFLICT


def _first_difference(a: Origin, b: Origin) -> tuple[Template, Template] | None:
    """Returns the templates of both chains at the first site that differs in template or block; None if no site
    differs.

    The last site of the shorter chain is repeated, so that text which a block prints through a macro of the same block
    and template is compared as text of that block.
    """
    for position in range(max(len(a.sites), len(b.sites))):
        ours, theirs = a.sites[min(position, len(a.sites) - 1)], b.sites[min(position, len(b.sites) - 1)]
        if template_of(ours) != template_of(theirs) or ours.block != theirs.block:
            return template_of(ours), template_of(theirs)
    return None


def repeat_findings(repeat: Repeat, event: Event, places: SourcePositions, *, is_root: bool) -> list[Diagnostic]:
    """Returns the findings about a duplicate key.

    Args:
        repeat: the two entries and their relation.
        event: the event of the later key.
        places: the map from positions to origins and errors.
        is_root: whether the key is the name of a target.

    Raises:
        LoadError: FG206 if one block gives two values.
    """
    earlier, later = repeat.earlier, repeat.later
    first, last = earlier.span or places.span(1), later.span
    if repeat.verdict is KeyVerdict.CONFLICT:
        raise places.fault_at(
            event,
            f"the key {later.key!r} appears twice in one block with different values; the first is at {first}",
            code="FG206",
            hint="remove one of them; to override a parent's line, put it in a child's block",
        )
    if is_root and (meant := _meant_block(repeat, event, places)):
        return [meant]
    if repeat.verdict is KeyVerdict.OVERRIDE:
        # An override is what a child is for: there is nothing to report unless it changes nothing.
        return list(_idle(earlier, later, event, places))
    notes = {
        KeyVerdict.SAME: f"the key {later.key!r} appears twice with the same value; the first is at {first}",
        KeyVerdict.UNSURE: f"the key {later.key!r} appears twice, and a filter hides its template; the later one wins",
        KeyVerdict.BURIED: f"the key {later.key!r} has no effect: the parent's line that follows it wins, at {last}",
    }
    buried = repeat.verdict is KeyVerdict.BURIED
    # An option of the command line beats the line of the config on purpose.
    if buried and _is_given(later):
        return []
    hint = "put the line below super()" if buried else "remove one of them"
    finding = places.finding(event, notes[repeat.verdict], code="FG207", severity=Severity.LINT, hint=hint)
    # For a buried line the child's line is the earlier one.
    return [replace(finding, span=earlier.span) if buried else finding]


def _meant_block(repeat: Repeat, event: Event, places: SourcePositions) -> Diagnostic | None:
    """Returns the finding for a target that was probably meant as the parent's block of that name; otherwise None."""
    earlier, later = repeat.earlier, repeat.later
    buried = repeat.verdict is KeyVerdict.BURIED
    ours, theirs = (earlier, later) if buried else (later, earlier)
    # Only a target with the name of a block can have been meant as one.
    if later.key not in places.blocks or not places.extends(ours.origin, theirs.origin):
        return None
    subject, place = f"the target {later.key!r} of this template", f"that of its parent, at {theirs.span}"
    finding = places.finding(
        event,
        f"{subject} is overridden by {place}"
        if buried
        else f"{subject} does not change {place}, in the values that use it",
        code="FG225",
        severity=Severity.ERROR if buried else Severity.WARNING,
        hint=_block_hint(str(later.key), ours.origin),
    )
    return replace(finding, span=ours.span)


def _block_hint(key: str, origin: Origin | None) -> str:
    """Returns what to do with a line that writes a target in place of a block of its name, and why."""
    if origin is not None and any(site.block == key for site in origin.sites):
        return f"remove `{key}:` from this line: the parent has written it, and the block [{key}] is the value below it"
    return (
        f"remove `{key}:` and write the block [{key}] with the value below it; `== super()` as its first line keeps "
        f"the parent's text. The parent writes `{key}:` itself; a target of your own needs another name"
    )


def _idle(earlier: Entry, later: Entry, event: Event, places: SourcePositions) -> Iterator[Diagnostic]:
    """Yields a lint for an override that changes nothing."""
    a, b = earlier.origin, later.origin
    if not (a and b) or a.span.file == b.span.file or not _same(earlier.value, later.value):
        return
    if not places.is_verbatim(event):
        return  # a computed value may differ in the next load
    message = f"{later.key!r} overrides the line at {a.span} with the same value"
    hint = "remove the line; or keep it, if the value must stay when that line changes"
    yield places.finding(event, message, code="FG233", severity=Severity.LINT, hint=hint)


def _is_given(entry: Entry) -> bool:
    """Returns whether a value comes from a variable that an option or a Python caller has set."""
    sets = entry.value.origin.sets if entry.value.origin else ()
    return any(site.span.file.startswith("<") for site in sets)


def _same(a: Node, b: Node) -> bool:
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        # By repr, 1 and 1.0 and True differ: an override may change the type only.
        return repr(a.value) == repr(b.value)
    return same_value(a, b)
