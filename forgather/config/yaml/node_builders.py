"""Builds the node of a tag and of the value after the tag.

The inputs are a `Tag`, and a scalar, a sequence or the entries of a mapping; the output is a node. Invariants: only
this module interprets the forms of arguments (`args`, `kwargs`, `arg0`, ...); nothing is imported.
"""

from __future__ import annotations

import re
from dataclasses import replace

from forgather.config.graph import (
    SPREAD,
    Call,
    CallKind,
    ContainerKind,
    Entry,
    Lookup,
    Mapped,
    Node,
    Scalar,
    Sequence,
    Var,
    describe,
    is_null,
)
from forgather.config.path import Index, Key
from forgather.config.tags import STANDARD, Tag
from forgather.config.traverse import SEARCH_PATH, edges
from forgather.config.yaml.events import Event, Refusal
from forgather.config.yaml.merge import overriding, through_alias
from forgather.config.yaml.scalars import resolve_scalar
from forgather.source import Origin

_POSITIONAL = re.compile(r"arg(0|[1-9][0-9]{0,3})")
_EXPLICIT = frozenset(("args", "kwargs"))


def tagged_scalar(tag: Tag, event: Event, origin: Origin | None, max_digits: int) -> Node:
    """Returns the node of a tag that is followed by a scalar or by no value.

    Args:
        tag: the tag.
        event: the event of the scalar.
        origin: the lines that wrote the scalar.
        max_digits: the largest number of digits that an integer may have.

    Raises:
        Refusal: FG212 if the tag cannot have a scalar as its value.
    """
    nothing = event.plain and not event.value
    if isinstance(tag.kind, type):
        return _value_node(tag.kind, event.value, None, origin)
    if isinstance(tag.kind, ContainerKind):
        # `!list` before nothing is an empty list.
        if not nothing:
            raise Refusal("FG212", f"!{tag.kind} is followed by {event.value[:80]!r}", _container_hint(tag.kind))
        return tagged_mapping(tag, (), origin) if _is_mapped(tag.kind) else tagged_sequence(tag, (), origin)
    value = resolve_scalar(event.value, max_digits) if event.plain else event.value
    written = None if value is event.value else event.value
    # `!call:f` has no arguments; `!call:f ~` has one, None.
    args = () if nothing else (Scalar(origin=origin, value=value, written=written),)
    return Call(origin=origin, kind=tag.kind, constructor=tag.constructor, args=args, name=tag.name)


def tagged_sequence(tag: Tag, items: tuple[Node, ...], origin: Origin | None, marks: tuple[Entry, ...] = ()) -> Node:
    """Returns the node of a tag that is followed by a sequence.

    Args:
        tag: the tag.
        items: the nodes of the items.
        origin: the lines that wrote the sequence.
        marks: the entries of the items that are aliases.

    Raises:
        Refusal: FG212 if the tag cannot have a sequence as its value.
    """
    if isinstance(tag.kind, CallKind):
        return Call(origin=origin, kind=tag.kind, constructor=tag.constructor, args=items, name=tag.name, marks=marks)
    if isinstance(tag.kind, type):
        raise Refusal("FG212", f"!{tag.kind.tag} is followed by a sequence", _value_hint(tag.kind))
    if _is_mapped(tag.kind):
        raise Refusal("FG212", f"!{tag.kind} is followed by a sequence", _container_hint(tag.kind))
    return Sequence(origin=origin, kind=tag.kind, items=items, name=tag.name, tagged=True, marks=marks)


def tagged_mapping(tag: Tag, entries: tuple[Entry, ...], origin: Origin | None) -> Node:
    """Returns the node of a tag that is followed by a mapping.

    Args:
        tag: the tag.
        entries: the entries of the mapping.
        origin: the lines that wrote the mapping.

    Raises:
        Refusal: FG212 if the tag cannot have a mapping as its value; FG213 if the arguments have a wrong form.
    """
    if isinstance(tag.kind, CallKind):
        return _call(tag.kind, tag, entries, origin)
    if isinstance(tag.kind, type):
        return _value_from_mapping(tag.kind, entries, origin)
    if not _is_mapped(tag.kind):
        raise Refusal("FG212", f"!{tag.kind} is followed by a mapping", _container_hint(tag.kind))
    return Mapped(origin=origin, kind=tag.kind, entries=entries, name=tag.name, tagged=True)


def standard_scalar(tag: str, event: Event, origin: Origin | None, max_digits: int) -> Node:
    """Returns the node of a scalar after one of the tags `!`, `!!str`, `!!int`, `!!float`, `!!bool` and `!!null`.

    Args:
        tag: the text of the tag.
        event: the event of the scalar.
        origin: the lines that wrote the scalar.
        max_digits: the largest number of digits that an integer may have.

    Raises:
        Refusal: FG212 if the scalar is of another type.
    """
    word = tag.removeprefix(STANDARD)
    if word in ("!", "str"):
        return Scalar(origin=origin, value=event.value)
    value = resolve_scalar(event.value, max_digits)
    wanted = {"int": int, "float": (int, float), "bool": bool, "null": type(None)}[word]
    if not isinstance(value, wanted) or (isinstance(value, bool) and word != "bool"):  # type: ignore[arg-type]
        raise Refusal("FG212", f"!!{word} is followed by {event.value[:80]!r}", "leave the tag out")
    # `!!float 1` is the float 1.0; every other standard tag leaves the value as it is.
    return Scalar(origin=origin, value=float(value) if word == "float" else value)  # type: ignore[arg-type]


STANDARD_SCALARS = frozenset(("!", *(STANDARD + word for word in ("str", "int", "float", "bool", "null"))))
STANDARD_CONTAINERS = frozenset(("!", STANDARD + "seq", STANDARD + "map"))


def _is_mapped(kind: ContainerKind) -> bool:
    return kind in (ContainerKind.DICT, ContainerKind.DLIST)


def _container_hint(kind: ContainerKind) -> str:
    if kind is ContainerKind.LIST:
        return "!list takes a sequence; !dlist reads a mapping as a list"
    return f"!{kind} takes a {'mapping' if _is_mapped(kind) else 'sequence'}"


def _value_hint(kind: type[Lookup]) -> str:
    if kind.is_expression:
        return f'write !{kind.tag} "max(1, total // batch)"'
    return f"write !{kind.tag} NAME, or !{kind.tag} {{name: NAME, default: VALUE}}"


def _value_node(kind: type[Lookup], text: str, default: Node | None, origin: Origin | None) -> Node:
    if not text.strip():
        raise Refusal("FG212", f"!{kind.tag} is followed by nothing", _value_hint(kind))
    if any(char in text for char in kind.excluded):
        raise Refusal("FG212", f"{text!r} cannot be the name of an environment variable", _value_hint(kind))
    return kind(origin=origin, text=text, default=default)


def _value_from_mapping(kind: type[Lookup], entries: tuple[Entry, ...], origin: Origin | None) -> Node:
    parts = {entry.key: entry.value for entry in entries}
    name = parts.pop("name", None)
    default = parts.pop("default", None)
    if kind.is_expression or parts or not isinstance(name, Scalar) or not isinstance(name.value, str):
        found = ", ".join(repr(entry.key) for entry in entries) or "nothing"
        raise Refusal("FG212", f"!{kind.tag} is followed by a mapping of {found}", _value_hint(kind))
    return _value_node(kind, name.value, default, origin)


def _call(kind: CallKind, tag: Tag, entries: tuple[Entry, ...], origin: Origin | None) -> Call:
    # Reserved keys are taken out first, so that they do not prevent the explicit form.
    reserved = {entry.key: entry for entry in entries if entry.key in (SEARCH_PATH, SPREAD)}
    plain = tuple(entry for entry in entries if entry.key not in reserved)
    node = Call(
        origin=origin,
        kind=kind,
        constructor=tag.constructor,
        latent_args=_latent_args(kind, reserved.get(SPREAD)),
        submodule_searchpath=reserved[SEARCH_PATH].value if SEARCH_PATH in reserved else None,
        name=tag.name,
    )
    marks = _remembered([reserved[SEARCH_PATH]]) if SEARCH_PATH in reserved else ()
    # Only `args` and `kwargs` and nothing else make the explicit form, so a constructor may have parameters of these
    # names.
    if plain and all(entry.key in _EXPLICIT for entry in plain):
        forms = {entry.key: entry for entry in plain}
        args, kwargs = _sequence_under(forms.get("args")), _mapping_under(forms.get("kwargs"))
        return replace(node, args=args, kwargs=kwargs, marks=(*marks, *_marks_under(forms.get("args"))))
    # `arg10` sorts after `arg9`, so the order is by number and not by text.
    numbered = [(int(match[1]), entry) for entry in plain if (match := _positional(entry))]
    ordered = [entry for _, entry in sorted(numbered, key=lambda pair: pair[0])]
    marks += _remembered([replace(entry, key=position) for position, entry in enumerate(ordered)])
    kwargs = _keywords(tuple(entry for entry in plain if not _positional(entry)))
    return replace(node, args=tuple(entry.value for entry in ordered), kwargs=kwargs, marks=marks)


def _latent_args(kind: CallKind, entry: Entry | None) -> tuple[Entry, ...]:
    """Returns the keyword arguments under `latent_args`; if a `!var` gives them, the entry of `latent_args` itself."""
    # A `!meta` gets its arguments unconstructed, so a `!var` there is a value like any other.
    if entry is not None and isinstance(entry.value, Var) and kind is not CallKind.META:
        return (entry,)
    entries = _mapping_under(entry)
    for inner in entries:
        if inner.key == SPREAD and isinstance(inner.value, Var):
            hint = f"for a keyword argument of that name write kwargs: {{{SPREAD}: ...}}"
            raise Refusal("FG213", f"{SPREAD!r} is inside {SPREAD!r}", hint, span=inner.span)
    return entries


def _remembered(entries: list[Entry]) -> tuple[Entry, ...]:
    """Returns the entries that have an alias or replaced entries."""
    return tuple(entry for entry in entries if entry.alias or entry.replaced)


def _positional(entry: Entry) -> re.Match[str] | None:
    return _POSITIONAL.fullmatch(entry.key) if isinstance(entry.key, str) else None


def is_positional(key: str) -> bool:
    """Returns whether a key in the mapping of a call stands for a positional argument, as `arg0` and `arg1` do."""
    return _POSITIONAL.fullmatch(key) is not None


def _keywords(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    for entry in entries:
        if not isinstance(entry.key, str):
            message = f"the keyword argument {entry.key!r} is not a string"
            hint = "keyword arguments are strings; quote the key, or use the explicit args:"
            raise Refusal("FG213", message, hint, span=entry.span)
    return entries


def _sequence_under(entry: Entry | None) -> tuple[Node, ...]:
    if entry is None or is_null(entry.value):
        return ()
    if isinstance(entry.value, Sequence):
        return entry.value.items
    raise Refusal(
        "FG213",
        f"'args' of the explicit form is {describe(entry.value)}; it must be a sequence of positional arguments",
        "for a keyword argument named args write kwargs: {args: ...}",
        span=entry.span,
    )


def _marks_under(entry: Entry | None) -> tuple[Entry, ...]:
    """Returns an entry for each item of `args:` that came through an alias or replaces an item of another `args:`."""
    if entry is None or not isinstance(entry.value, Sequence):
        return ()
    marks = {mark.key: mark for mark in entry.value.marks}
    items = [marks.get(at) or Entry(at, item) for at, item in enumerate(entry.value.items)]
    return _remembered([_seen_in(entry, item) for item in items])


def _seen_in(form: Entry, entry: Entry) -> Entry:
    """Returns an entry of `args:`, `kwargs:` or `latent_args:` with the alias and replaced entries of that key."""
    if not form.alias and not form.replaced:
        return entry
    seen = through_alias(entry, form.alias, form.through)
    for earlier in form.replaced:
        for step, child, inner in edges(earlier.value):
            if step == Key(entry.key) or (isinstance(entry.key, int) and step == Index(entry.key)):
                seen = overriding(seen, inner or Entry(entry.key, child, child.origin))
    return seen


def _mapping_under(entry: Entry | None) -> tuple[Entry, ...]:
    if entry is None or is_null(entry.value):
        return ()
    if isinstance(entry.value, Mapped):
        return _keywords(tuple(_seen_in(entry, inner) for inner in entry.value.entries))
    raise Refusal(
        "FG213",
        f"{entry.key!r} is {describe(entry.value)}; it must be a mapping of keyword arguments",
        f"for a keyword argument of that name write kwargs: {{{entry.key}: ...}}",
        span=entry.span,
    )
