"""The records that a `Reader` returns.

A signature may accept more calls than the real callable, but never fewer. An annotation that cannot be interpreted
accepts any value.
"""

from __future__ import annotations

import inspect
from typing import Literal, NamedTuple

from forgather.source import Span


class _UnknownValue:
    """The type of `UNKNOWN`."""

    def __repr__(self) -> str:
        return "UNKNOWN"

    # Pickled by name, so that `is UNKNOWN` also holds for a copy.
    def __reduce__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _UnknownValue()
"""The value of a default whose expression is not a literal."""


class Default(NamedTuple):
    """The default of a parameter.

    Args:
        text: the source text of the default.
        value: the value of the default if it is a literal, else `UNKNOWN`.
    """

    text: str
    value: object = UNKNOWN


class Annotation(NamedTuple):
    """The annotation of a parameter or of a result.

    Args:
        text: the source text of the annotation; "" if there is none.
        accepts: the kinds of values that the annotation accepts; None if it accepts any value. Each kind is one of
            "none", "bool", "int", "float", "str", "bytes", "list", "tuple", "dict", "callable", "iterable" and "type",
            or "instance:<module>:<Class>".
    """

    text: str
    accepts: frozenset[str] | None = None


NO_ANNOTATION = Annotation("")


class Callee(NamedTuple):
    """The signature of a constructor.

    Args:
        name: the name of the constructor in messages ("AdamW").
        signatures: the alternative signatures; a call is accepted if it matches one of them. Defaults are of type
            `Default`, annotations of type `Annotation`.
        kind: the kind of the constructor: "class" or "function".
        span: the location of the definition; None for a builtin.
        gives: the annotation of the result of a call.
        callable_instance: whether the result of a call is callable; None if this is unknown.
        other_names: further keywords that a class accepts by its `attribute_map`, as configs of transformers do.
        defined_as: the module and the qualified name of the definition ("torch.optim.adamw:AdamW"), wherever else the
            constructor may be imported from; "" if several definitions are possible.
    """

    name: str
    signatures: tuple[inspect.Signature, ...]
    kind: Literal["class", "function"]
    span: Span | None = None
    gives: Annotation = NO_ANNOTATION
    callable_instance: bool | None = None
    other_names: tuple[str, ...] = ()
    defined_as: str = ""


class Unknown(NamedTuple):
    """A constructor whose signature cannot be read from source.

    Args:
        constructor: the constructor as the config writes it.
        reason: the reason why the signature is unknown.
    """

    constructor: str
    reason: str


class Member(NamedTuple):
    """A method or attribute that a class of the user defines.

    Args:
        owner: the name of the class.
        name: the name of the method or attribute.
        span: the location of the definition; None if it is unknown.
    """

    owner: str
    name: str
    span: Span | None


class Lineage(NamedTuple):
    """The base classes of a class, and the definitions of the names that were searched in them.

    Args:
        bases: the dotted names of the classes in the method resolution order.
        members: the definitions of the searched names, without those in the classes of excluded packages.
    """

    bases: tuple[str, ...]
    members: tuple[Member, ...]
