"""What a name can stand for in source.

Takes nothing, gives the records of the reading: modules, classes, functions, partials. Keeps true: a `Thing` is found
by reading; `Doubt` says why nothing can be said.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from forgather.signatures.finding import Found
from forgather.signatures.text import Block, Parsed, Text, body_of


class Module:
    """A module's source.

    Args:
        found: where it is.
        text: its text; None where it has no source.
        is_stub: whether the text is that of a `.pyi` file.
    """

    __slots__ = ("found", "is_stub", "text", "_block", "_has", "_is_broken")

    def __init__(self, found: Found, text: Text | None, *, is_stub: bool = False) -> None:
        self.found, self.text, self.is_stub = found, text, is_stub
        self._block: Block | None = None
        self._is_broken = False
        self._has: dict[str, bool] = {}

    @property
    def name(self) -> str:
        """Its dotted name."""
        return self.found.name

    @property
    def file(self) -> str | None:
        """Its source file."""
        return self.found.stub if self.is_stub else self.found.file

    @property
    def block(self) -> Block:
        """Its statements."""
        if self._block is None:
            try:
                self._block = (self.text or Text("")).block()
            except SyntaxError:
                self._block, self._is_broken = Text("").block(), True
        return self._block

    @property
    def is_broken(self) -> bool:
        """Whether it is no valid Python, as far as it was read."""
        _ = self.block
        return self._is_broken

    def has(self, word: str) -> bool:
        """Returns whether its text holds a piece of text."""
        if word not in self._has:
            self._has[word] = self.text is not None and word in self.text.text
        return self._has[word]


@dataclass(frozen=True, slots=True, eq=False)
class Class:
    """A class statement, the module it stands in, and the attributes that a function has set on it."""

    module: Module
    node: ast.ClassDef
    outer: Class | None = None
    altered: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Its name, with those of the classes around it."""
        return f"{self.outer.name}.{self.node.name}" if self.outer else self.node.name

    @property
    def body(self) -> Block | Parsed:
        """Its statements."""
        return body_of(self.node)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function statement; `owner` is the class that it was looked up on, `home` the one it stands in."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    home: Class | None = None
    owner: Class | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.node.name


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """`functools.partial` of something, with the number of positional arguments and the names of the keywords."""

    inner: Any
    args: int
    keywords: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tuples:
    """What `collections.namedtuple` makes: names of the fields, and how many of the last have a default."""

    fields: tuple[str, ...]
    defaults: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A name that is judged by name ("typing.Generic", "builtins.dict")."""

    dotted: str


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value that is no class, function or module; `node` is the expression it came from."""

    module: Module
    node: ast.expr


@dataclass(frozen=True, slots=True)
class Doubt:
    """What cannot be known, and why."""

    reason: str


Thing = Module | Class | Function | Partial | Tuples | Ref | Value | Doubt


def dotted_name(thing: Thing) -> str:
    """Returns the dotted name of what was found; "" where it has none."""
    if isinstance(thing, Ref):
        return thing.dotted
    if isinstance(thing, Class | Function):
        return f"{thing.module.name}.{thing.name}"
    return ""


def foreign(module: Module) -> Doubt:
    """Returns the doubt about what a compiled module holds."""
    return Doubt(f"{module.name!r} is not written in Python")
