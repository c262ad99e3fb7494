"""The object graph: frozen nodes that describe what to build and where each part was written.

`load` makes the nodes; the later stages read them. Invariants: a node never changes (a construction has its own state);
nodes compare by identity, because a node with two paths is built as one object; every value, also a plain scalar, is a
node with its origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from forgather.config.path import PlainKey, PlainScalar
from forgather.errors import Diagnostic, UnknownTargetError
from forgather.source import Origin, Span
from forgather.spelling import close_matches

_LISTED = 30


class CallKind(StrEnum):
    """The way in which a constructor is called: once, at every occurrence, later, or with unbuilt arguments."""

    SINGLETON = "singleton"
    FACTORY = "factory"
    PARTIAL = "partial"
    META = "meta"

    @property
    def gives_result(self) -> bool:
        """Whether construction makes the call, so that the object of the node is the result of the call."""
        return self not in (CallKind.PARTIAL, CallKind.META)


SPREAD = "latent_args"
"""The key of a `!var` whose value gives all latent arguments of a call."""


class ContainerKind(StrEnum):
    """The kinds of containers. A `DLIST` is written as a mapping and built as a list."""

    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    DLIST = "dlist"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """Base of all nodes.

    Args:
        origin: the lines that wrote the value; None if the node was made in Python.
    """

    origin: Origin | None = None

    @property
    def span(self) -> Span | None:
        """The place of the value in the user's file."""
        return self.origin.span if self.origin else None

    @property
    def name(self) -> str | None:
        """The name after `@` in the tag of the node; None if there is no such name."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Scalar(Node):
    """A plain value: string, number, boolean or null.

    Args:
        value: the Python value.
        written: the text in the document (`3e-4`, `0o17`); None if the value is a string.
    """

    value: PlainScalar
    written: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One key of a mapping, or one keyword argument.

    Args:
        key: the key, which is a plain scalar or a tuple of plain scalars.
        value: the node under the key.
        origin: the lines that wrote the key.
        replaced: the entries of the same key that this entry overrides, nearest first.
        alias: the anchor name of the alias that gives the value (`lr: *lr`), or `<<` for an entry from a merge key;
            None if the value is written after the key.
        through: the lines of the aliases and merge keys that lead to the value, nearest first.
    """

    key: PlainKey
    value: Node
    origin: Origin | None = None
    replaced: tuple[Entry, ...] = ()
    alias: str | None = None
    through: tuple[Origin, ...] = ()

    @property
    def span(self) -> Span | None:
        """The place of the key in the user's file."""
        return self.origin.span if self.origin else None


@dataclass(frozen=True, slots=True, eq=False)
class Call(Node):
    """A call of an importable object: `!singleton`, `!factory`, `!partial`, `!meta`.

    Args:
        kind: the way in which the constructor is called.
        constructor: the name of the constructor: "module:symbol.path", "path/to/file.py:symbol" or a builtin.
        args: the positional arguments.
        kwargs: the keyword arguments, in order.
        latent_args: the keyword arguments that are built last and override the others. A `!var` that gives such
            arguments is an entry with the key `latent_args`.
        submodule_searchpath: the node of a folder or a list of folders. A constructor `.module:symbol` is searched in
            these folders, and so are the relative imports of a constructor's file.
        name: the name after `@` in the tag.
        marks: an entry for each positional argument, and for the search path, that is an alias or replaced another
            value. The key is the position, or "submodule_searchpath".
    """

    kind: CallKind
    constructor: str
    args: tuple[Node, ...] = ()
    kwargs: tuple[Entry, ...] = ()
    latent_args: tuple[Entry, ...] = ()
    submodule_searchpath: Node | None = None
    name: str | None = None
    marks: tuple[Entry, ...] = ()

    @property
    def spread(self) -> Node | None:
        """The `!var` of `latent_args: !var name`, whose value gives the keywords; None if there is no such `!var`."""
        return next((entry.value for entry in self.latent_args if _is_spread(entry)), None)

    @property
    def named_latent_args(self) -> tuple[Entry, ...]:
        """The keywords of `latent_args` that the config has as entries."""
        return tuple(entry for entry in self.latent_args if not _is_spread(entry))


@dataclass(frozen=True, slots=True, eq=False)
class Container(Node):
    """A sequence or a mapping, with a tag or without.

    Args:
        kind: the kind of the container.
        name: the name after `@` in the tag.
        tagged: whether the config writes the container with a tag.
    """

    kind: ContainerKind
    name: str | None = field(default=None, kw_only=True)
    tagged: bool = field(default=False, kw_only=True)

    @property
    def is_plain(self) -> bool:
        """Whether YAML writes the container without a tag."""
        return not self.tagged and self.kind in (ContainerKind.LIST, ContainerKind.DICT)


@dataclass(frozen=True, slots=True, eq=False)
class Sequence(Container):
    """`!list`, `!tuple` and plain sequences.

    Args:
        items: the values.
        marks: an entry for each item that is an alias or replaced another value; the key is the position of the item.
    """

    items: tuple[Node, ...] = ()
    marks: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Mapped(Container):
    """`!dict`, `!dlist` and plain mappings.

    Args:
        entries: the keys and values, in order.
    """

    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Lookup(Node):
    """A value that is looked up or computed at construction: `!var`, `!env`, `!calc`.

    Args:
        text: the name or the expression after the tag.
        default: the node of the default value; None if there is no default.
    """

    tag: ClassVar[str]
    """The word of the tag, such as "var"."""
    is_expression: ClassVar[bool] = False
    """Whether the text is an expression, which is written in quotes and has no default."""
    excluded: ClassVar[str] = ""
    """The characters that the text may not contain."""
    text: str
    default: Node | None = None

    @property
    def variable(self) -> str:
        """The name of the variable."""
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Var(Lookup):
    """`!var`: a value that the caller of `materialize` gives."""

    tag = "var"


@dataclass(frozen=True, slots=True, eq=False)
class Env(Lookup):
    """`!env`: an environment variable, which is read at construction."""

    tag = "env"
    excluded = "=\0"


@dataclass(frozen=True, slots=True, eq=False)
class Calc(Lookup):
    """`!calc`: arithmetic on variables and targets, which is evaluated at construction; it has no default."""

    tag = "calc"
    is_expression = True

    @property
    def expression(self) -> str:
        """The arithmetic expression."""
        return self.text


def word_of(node: Node) -> str:
    """Returns the kind of a node in one word: the word of its tag, or `scalar`."""
    if isinstance(node, (Call, Container)):
        return str(node.kind)
    return node.tag if isinstance(node, Lookup) else "scalar"


def describe(node: Node) -> str:
    """Returns the description of a node in messages."""
    if isinstance(node, Scalar):
        return "nothing" if node.value is None else f"the value {str(node.value)[:80]!r}"
    if isinstance(node, Container):
        return "a sequence" if isinstance(node, Sequence) else "a mapping"
    return f"!{word_of(node)}:{node.constructor}" if isinstance(node, Call) else f"!{word_of(node)}"


def label(node: Node) -> tuple[object, ...]:
    """Returns a key that is equal for two nodes that differ at most in the contents of their children."""
    # By `repr`, 1 differs from True, and nan equals nan.
    if isinstance(node, Scalar):
        return "scalar", repr(node.value)
    if isinstance(node, Call):
        # The numbers of children are part of the label, so that children can be compared pairwise.
        shape = len(node.args), len(node.kwargs), len(node.latent_args), node.submodule_searchpath is not None
        return node.kind, node.constructor, node.name, *shape
    if isinstance(node, (Sequence, Mapped)):
        return node.kind, node.name, node.tagged, len(node.items if isinstance(node, Sequence) else node.entries)
    if isinstance(node, Lookup):
        return node.tag, node.text, node.default is None
    raise TypeError(f"unknown node {type(node).__name__}")


def is_leaf(node: Node) -> bool:
    """Returns whether a node of this kind cannot contain other nodes."""
    return isinstance(node, Scalar) or (isinstance(node, Lookup) and node.is_expression)


def is_null(node: Node) -> bool:
    """Returns whether a node is null (`~`); a `!dlist` drops null items."""
    return isinstance(node, Scalar) and node.value is None


def is_one_object(node: Node, *, is_aliased: bool) -> bool:
    """Returns whether construction builds a node once, so that all its aliases are the same object.

    Args:
        node: the node.
        is_aliased: whether the graph contains the node more than once, or as the value of a root key.
    """
    if isinstance(node, Call):
        return node.kind is not CallKind.FACTORY
    # A tagged container is shared, even inside a factory.
    return is_aliased or (isinstance(node, Container) and node.tagged)


@dataclass(frozen=True, eq=False)
class Graph:
    """A loaded config, before anything is built.

    Args:
        targets: the root entries that can be built, by name, in order.
        definitions: the root entries whose keys start with a dot.
        anchors: the name of each anchored node, by `id(node)`, for printing and generated code.
        diagnostics: the warnings and lints that were found while loading.
        kept: the anchored nodes. Without these references, another object could get an id that is in `anchors`.
    """

    targets: Mapping[str, Entry]
    definitions: tuple[Entry, ...] = ()
    anchors: Mapping[int, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    kept: tuple[Node, ...] = ()

    def target(self, name: str) -> Entry:
        """Returns the target of that name.

        Raises:
            UnknownTargetError: FG302 if there is no such target; the hint lists the targets.
        """
        if name in self.targets:
            return self.targets[name]
        hint = list_of_targets(list(self.targets), name)
        # The name exists, so a list of other names would be the wrong hint.
        if name.startswith(".") and any(entry.key == name for entry in self.definitions):
            hint = "a name that begins with '.' is a definition: give it another name to make it a target"
        raise UnknownTargetError(f"no target {name!r}", hint=hint, found=name)


def list_of_targets(names: list[str], wanted: str) -> str:
    """Returns a hint for an unknown target: the nearest name, if one is near, and a list of the first names."""
    if not names:
        return "the config has no targets"
    near = close_matches(wanted, names, n=1)
    shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return (f"did you mean {near[0]!r}? " if near else "") + f"targets: {shown}"


def _is_spread(entry: Entry) -> bool:
    return entry.key == SPREAD and isinstance(entry.value, Var)
