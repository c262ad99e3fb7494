"""The object graph: frozen nodes that say what to build, and where each part was written.

Takes nothing; `load` makes these, everything else reads them. Keeps true: a node is never written to after
it was made (construction state lives in the construction), nodes compare by identity (sharing is
meaning), and every value, plain scalars included, is a node that carries its origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forgather.errors import Diagnostic, UnknownTargetError
from forgather.source import Origin, Span
from forgather.spelling import close_matches

PlainScalar = str | int | float | bool | None
_LISTED = 30


class CallKind(StrEnum):
    """When a constructor is called: once, at every place, later, or with its arguments unbuilt."""

    SINGLETON = "singleton"
    FACTORY = "factory"
    PARTIAL = "partial"
    META = "meta"


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


@dataclass(frozen=True, slots=True, eq=False)
class Scalar(Node):
    """A plain value: string, number, boolean or null.

    Args:
        value: the value.
        written: how it was written, where YAML read a text as something else (`3e-4`, `0o17`); None for a string.
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
        alias: anchor name through which the value was written (`lr: *lr`), or `<<` for a merged entry; None where
            the value stands in place.
        through: the lines of the aliases and merge keys by which the value got here, nearest first.
    """

    key: PlainScalar | tuple[PlainScalar, ...]
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
    """A call of something importable: `!singleton`, `!factory`, `!partial`, `!meta`.

    Args:
        kind: when it is called.
        constructor: "module:symbol.path", "path/to/file.py:symbol" or a short name.
        args: positional arguments.
        kwargs: keyword arguments, in order.
        latent_args: keywords that are constructed last and merged last; a `!var` that gives them has the key
            `latent_args` itself.
        submodule_searchpath: folders for file imports relative to the constructor's file.
        name: identity, the `@name` of the tag.
        marks: what is remembered of positional arguments and of the search path, by position or name: the aliases,
            and what they replaced.
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
        """The `!var` of `latent_args: !var name`, whose value holds the keywords; None where they are written out."""
        return next((entry.value for entry in self.latent_args if _is_spread(entry)), None)

    @property
    def named_latent_args(self) -> tuple[Entry, ...]:
        """The keywords of `latent_args` that are written out."""
        return tuple(entry for entry in self.latent_args if not _is_spread(entry))


@dataclass(frozen=True, slots=True, eq=False)
class Sequence(Node):
    """`!list`, `!tuple` and plain sequences.

    Args:
        kind: `LIST` or `TUPLE`.
        items: the values.
        name: identity, the `@name` of the tag.
        tagged: False for a plain sequence without a tag.
        marks: what is remembered of items, by position: those that are aliases, and what they replaced.
    """

    kind: ContainerKind
    items: tuple[Node, ...] = ()
    name: str | None = None
    tagged: bool = False
    marks: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Mapped(Node):
    """`!dict`, `!dlist` and plain mappings.

    Args:
        kind: `DICT` or `DLIST`.
        entries: the keys and values, in order.
        name: identity, the `@name` of the tag.
        tagged: False for a plain mapping without a tag.
    """

    kind: ContainerKind
    entries: tuple[Entry, ...] = ()
    name: str | None = None
    tagged: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Var(Node):
    """`!var`: a value given at construction time; `default` is None where there is no default."""

    variable: str
    default: Node | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Env(Node):
    """`!env`: an environment variable read at construction; `default` is None where there is no default."""

    variable: str
    default: Node | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Calc(Node):
    """`!calc`: arithmetic on variables and targets, evaluated at construction."""

    expression: str


@dataclass(frozen=True, eq=False)
class Graph:
    """What a config says, before anything is built.

    Args:
        targets: root entries that can be asked for, by name, in order.
        definitions: root entries whose key starts with a dot.
        anchors: anchor name of each anchored node, by `id(node)`; names for printing and code.
        diagnostics: warnings and lints found while loading.
        kept: anchored nodes, held so that the ids in `anchors` stay theirs even where nothing else uses them.
    """

    targets: Mapping[str, Entry]
    definitions: tuple[Entry, ...] = ()
    anchors: Mapping[int, str] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    kept: tuple[Node, ...] = ()

    def target(self, name: str) -> Entry:
        """Returns the target of that name.

        Raises:
            UnknownTargetError: there is none; the hint lists those there are.
        """
        if name in self.targets:
            return self.targets[name]
        hint = list_of_targets(list(self.targets), name)
        if name.startswith(".") and any(entry.key == name for entry in self.definitions):
            hint = "a name that begins with '.' is a definition: give it another name to make it a target"
        raise UnknownTargetError(f"no target {name!r}", hint=hint, found=name)


def list_of_targets(names: list[str], wanted: str) -> str:
    """Returns the nearest of the names, and the list of them, cut where it is long."""
    if not names:
        return "the config has no targets"
    near = close_matches(wanted, names, n=1)
    shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return (f"did you mean {near[0]!r}? " if near else "") + f"targets: {shown}"


def _is_spread(entry: Entry) -> bool:
    return entry.key == SPREAD and isinstance(entry.value, Var)
