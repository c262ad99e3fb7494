"""The records that a `Reader` returns.

A signature may accept more than the real callable does, but never less. An annotation that is not understood accepts
anything.
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
"""The value of a default that is not a literal."""


class Default(NamedTuple):
    """The default of a parameter.

    Args:
        text: its source.
        value: its value if it is a literal, else `UNKNOWN`.
    """

    text: str
    value: object = UNKNOWN


class Annotation(NamedTuple):
    """The annotation of a parameter or of a result.

    Args:
        text: its source; "" if there is none.
        accepts: the kinds of values that it accepts: words out of "none bool int float str bytes list tuple dict
            callable iterable type", and "instance:<module>:<Class>"; None if it accepts anything.
    """

    text: str
    accepts: frozenset[str] | None = None


NO_ANNOTATION = Annotation("")


class Callee(NamedTuple):
    """The signature of a constructor.

    Args:
        name: its name in messages ("AdamW").
        signatures: a call is accepted if it matches one of them. Defaults are of type `Default`, annotations of type
            `Annotation`.
        kind: "class" or "function".
        span: the place of its definition; None for a builtin.
        gives: the result of a call.
        callable_instance: whether the result of a call is callable; None if that is unknown.
        other_names: further keywords that a class accepts by its `attribute_map`, as configs of transformers do.
    """

    name: str
    signatures: tuple[inspect.Signature, ...]
    kind: Literal["class", "function"]
    span: Span | None = None
    gives: Annotation = NO_ANNOTATION
    callable_instance: bool | None = None
    other_names: tuple[str, ...] = ()


class Unknown(NamedTuple):
    """A constructor whose signature cannot be read from source.

    Args:
        constructor: the constructor as the config writes it.
        reason: why its signature is unknown.
    """

    constructor: str
    reason: str


class Member(NamedTuple):
    """A method or attribute that a class of the user defines.

    Args:
        owner: the class.
        name: the name.
        span: the place of the definition.
    """

    owner: str
    name: str
    span: Span | None


class Lineage(NamedTuple):
    """The bases of a class, and the names that were looked for in it.

    Args:
        bases: the dotted names of its method resolution order.
        members: the definitions of the names that were looked for, in the classes outside the excluded package.
    """

    bases: tuple[str, ...]
    members: tuple[Member, ...]
