"""The object graph: frozen nodes that describe what to build and where each part was written.

`load` makes the nodes, everything else reads them. Invariants: a node never changes (the state of a construction is
kept in the construction); nodes compare by identity, because sharing has a meaning; every value, plain scalars
included, is a node with its origin.
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
    """When a constructor is called: once, at every occurrence, later, or with unconstructed arguments."""

    SINGLETON = "singleton"
    FACTORY = "factory"
    PARTIAL = "partial"
    META = "meta"

    @property
    def gives_result(self) -> bool:
        """Whether construction calls it, so that the object of the node is the result of the call."""
        return self not in (CallKind.PARTIAL, CallKind.META)


SPREAD = "latent_args"
"""The key of a `!var` that gives all latent arguments of a call."""


class ContainerKind(StrEnum):
    """The container forms. `DLIST` is written as a mapping and read as a list."""

    LIST = "list"
    TUPLE = "tuple"
    DICT = "dict"
    DLIST = "dlist"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """Base of all nodes.

    Args:
        origin: where the value was written; None for nodes made in Python.
    """

    origin: Origin | None = None

    @property
    def span(self) -> Span | None:
        """The place of the value in the user's file."""
        return self.origin.span if self.origin else None

    @property
    def name(self) -> str | None:
        """The `@name` of its tag; None if it has none."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Scalar(Node):
    """A plain value: string, number, boolean or null.

    Args:
        value: the value.
        written: the text in the document, if the value is not a string (`3e-4`, `0o17`); None for a string.
    """

    value: PlainScalar
    written: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One key of a mapping, or one keyword argument.

    Args:
        key: the key, a plain scalar or a tuple of plain scalars.
        value: the node under it.
        origin: where the key was written.
        replaced: entries of the same key that this one overrides, nearest first.
        alias: anchor name of the alias that gives the value (`lr: *lr`), or `<<` for a merged entry; None for a value
            that is written here.
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
        kind: when it is called.
        constructor: "module:symbol.path", "path/to/file.py:symbol" or a short name.
        args: positional arguments.
        kwargs: keyword arguments, in order.
        latent_args: keywords that are constructed last and merged last; a `!var` that gives them has the key
            `latent_args` itself.
        submodule_searchpath: folders for file imports relative to the constructor's file.
        name: the `@name` of the tag.
        marks: entries for positional arguments and the search path that are aliases or replaced other values; their
            keys are positions or the name of the search path.
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
        """The `!var` of `latent_args: !var name`, whose value gives the keywords; None if they are written out."""
        return next((entry.value for entry in self.latent_args if _is_spread(entry)), None)

    @property
    def named_latent_args(self) -> tuple[Entry, ...]:
        """The keywords of `latent_args` that are written out."""
        return tuple(entry for entry in self.latent_args if not _is_spread(entry))


@dataclass(frozen=True, slots=True, eq=False)
class Container(Node):
    """A sequence or a mapping, with a tag or without.

    Args:
        kind: its form.
        name: the `@name` of the tag.
        tagged: False for a plain one without a tag.
    """

    kind: ContainerKind
    name: str | None = field(default=None, kw_only=True)
    tagged: bool = field(default=False, kw_only=True)

    @property
    def is_plain(self) -> bool:
        """Whether YAML writes it without a tag."""
        return not self.tagged and self.kind in (ContainerKind.LIST, ContainerKind.DICT)


@dataclass(frozen=True, slots=True, eq=False)
class Sequence(Container):
    """`!list`, `!tuple` and plain sequences.

    Args:
        items: the values.
        marks: entries for items that are aliases or replaced other values; their keys are positions.
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
        text: the name or expression after the tag.
        default: the node of the default; None if there is none.
    """

    tag: ClassVar[str]
    """The word of the tag."""
    is_expression: ClassVar[bool] = False
    """Whether the text is an expression, which is written in quotes and has no default."""
    excluded: ClassVar[str] = ""
    """Characters that the text may not contain."""
    text: str
    default: Node | None = None

    @property
    def variable(self) -> str:
        """The name of the variable."""
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Var(Lookup):
    """`!var`: a value given at construction time."""

    tag = "var"


@dataclass(frozen=True, slots=True, eq=False)
class Env(Lookup):
    """`!env`: an environment variable read at construction."""

    tag = "env"
    excluded = "=\0"


@dataclass(frozen=True, slots=True, eq=False)
class Calc(Lookup):
    """`!calc`: arithmetic on variables and targets, evaluated at construction; without a default."""

    tag = "calc"
    is_expression = True

    @property
    def expression(self) -> str:
        """The arithmetic."""
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
    """Returns a key that is equal for nodes that are equal apart from their children."""
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
    """Returns whether a node is `~`, which a `!dlist` drops."""
    return isinstance(node, Scalar) and node.value is None


def is_one_object(node: Node, *, is_aliased: bool) -> bool:
    """Returns whether every alias of a node is one object.

    Args:
        node: the node.
        is_aliased: whether the graph contains it more than once, or it is the value of a root key.
    """
    if isinstance(node, Call):
        return node.kind is not CallKind.FACTORY
    # A tagged container is shared, even inside a factory.
    return is_aliased or (isinstance(node, Container) and node.tagged)


@dataclass(frozen=True, eq=False)
class Graph:
    """A loaded config, before anything is built.

    Args:
        targets: root entries that can be built, by name, in order.
        definitions: root entries whose key starts with a dot.
        anchors: anchor name of each anchored node, by `id(node)`; names for printing and code.
        diagnostics: warnings and lints found while loading.
        kept: anchored nodes; without a reference to them, an id in `anchors` could be re-used by another object.
    """

    targets: Mapping[str, Entry]
    definitions: tuple[Entry, ...] = ()
    anchors: Mapping[int, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    kept: tuple[Node, ...] = ()

    def target(self, name: str) -> Entry:
        """Returns the target of that name.

        Raises:
            UnknownTargetError: there is none; the hint lists the targets.
        """
        if name in self.targets:
            return self.targets[name]
        hint = list_of_targets(list(self.targets), name)
        # The name exists, so a list of other names would be the wrong hint.
        if name.startswith(".") and any(entry.key == name for entry in self.definitions):
            hint = "a name that begins with '.' is a definition: give it another name to make it a target"
        raise UnknownTargetError(f"no target {name!r}", hint=hint, found=name)


def list_of_targets(names: list[str], wanted: str) -> str:
    """Returns a hint: the nearest of the names, and the first of them."""
    if not names:
        return "the config has no targets"
    near = close_matches(wanted, names, n=1)
    shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return (f"did you mean {near[0]!r}? " if near else "") + f"targets: {shown}"


def _is_spread(entry: Entry) -> bool:
    return entry.key == SPREAD and isinstance(entry.value, Var)
