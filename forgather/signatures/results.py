"""What is known of a constructor, as data.

Takes nothing, gives the records that a `Reader` returns. Keeps true: a signature may accept more than the real callable
does, never less; an annotation that is not understood accepts anything.
"""

from __future__ import annotations

import inspect
from typing import Literal, NamedTuple

from forgather.source import Span


class _UnknownValue:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __reduce__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _UnknownValue()
"""A default that is no literal."""


class Default(NamedTuple):
    """What a parameter is when the call does not give it.

    Args:
        text: as the source writes it.
        value: the literal; `UNKNOWN` where it is none.
    """

    text: str
    value: object = UNKNOWN


class Annotation(NamedTuple):
    """What a parameter takes, or what a call gives.

    Args:
        text: as the source writes it; "" where it writes nothing.
        accepts: words out of "none bool int float str bytes list tuple dict callable iterable type" and
            "instance:<module>:<Class>"; None where anything may go.
    """

    text: str
    accepts: frozenset[str] | None = None


NO_ANNOTATION = Annotation("")


class Callee(NamedTuple):
    """How a constructor may be called.

    Args:
        name: how messages call it ("AdamW").
        signatures: what it accepts: a call fits when it fits one of them. A default is a `Default`, an annotation an
            `Annotation`.
        kind: "class" or "function".
        span: where it is defined; None for a builtin.
        gives: what a call gives.
        callable_instance: whether what a call gives can be called; None where that is unknown.
        other_names: further keywords that a class takes for its own, by its `attribute_map` (as transformers' configs).
    """

    name: str
    signatures: tuple[inspect.Signature, ...]
    kind: Literal["class", "function"]
    span: Span | None = None
    gives: Annotation = NO_ANNOTATION
    callable_instance: bool | None = None
    other_names: tuple[str, ...] = ()


class Unknown(NamedTuple):
    """A constructor whose signature source does not tell.

    Args:
        constructor: as the config names it.
        reason: why it is not known.
    """

    constructor: str
    reason: str


class Member(NamedTuple):
    """A name that a class of the user's binds.

    Args:
        owner: the class.
        name: what it binds.
        span: where.
    """

    owner: str
    name: str
    span: Span | None


class Lineage(NamedTuple):
    """What a class comes from, and what it adds to that.

    Args:
        bases: dotted names of the class and those behind it, in Python's order.
        members: what the classes in front of the first base that was asked for bind, of the names that were asked for.
    """

    bases: tuple[str, ...]
    members: tuple[Member, ...]
