"""Random graphs in which everything that Python can say occurs, shared and nested."""

from __future__ import annotations

import math
from random import Random

from forgather.config.graph import (
    Calc,
    Call,
    CallKind,
    ContainerKind,
    Entry,
    Env,
    Graph,
    Mapped,
    Node,
    Scalar,
    Sequence,
    Var,
)

STRINGS = ["", "a", "it's", 'say "x"', "both ' and \"", "\\", "\\n", "a\nb\n", "\r\t\x00", "\x85\u2028", "é模", "\U0001f600",
           "{x}", "%s", "#", '"""', "'''", "\\'", "x" * 150, "word " * 60, "\n" * 100, "\\" * 90 + '"' * 30, "\u202e"]  # fmt: skip
NUMBERS = [0, -1, 10**30, 10**400, 1.5, -0.0, 1e-5, 1e300, math.inf, -math.inf, math.nan, True, False, None]
CONSTRUCTORS = ["torch:nn.Linear", "torch.nn:Linear", "torch.optim:AdamW", "other:AdamW", "other:Linear", "a-b:c", "m:class",
                "m:a.b.c", "functools:reduce", "os:getcwd", "math:sqrt", "numpy:sum", "x.y2:z", "x.y10:z", "m:A", "m:AB",
                "m:Ab", "m:_a", "os:environ.get", "print", "sorted", "blocks.py:Layer", "sub/blocks.py:Layer",
                "math.py:sin", "builtins:print", "m:build", "m:partial", "m:list"]  # fmt: skip
NAMES = [None, None, None, "model", "a.b", "x-1", "class", "list", "l", "AdamW", "build"]
VARIABLES = ["lr", "my-var", "class", "len", "run_dir", "one"]
KEYWORDS = ["a", "b", "lr", "my-key", "class", "self", "name", "func", "args", "kwargs", "print", "ﬁ", "__debug__"]
TARGETS = ["main", "one", "two", "three", "my-target", "class"]
EXPRESSIONS = ["1 + 2 * 3", "(1 + 2) * -3 ** 2", "2 ** -1", "one * 2", "max(one, two) - 1", "lr * one", "one if two > 1 else 3",
               "one and two or 3", "1 < one < two", "len([1, 2]) // 2", "not one", "-(one + two)", "round(lr, 2)", "one == None",
               "(one if lr else two) + 1", "one + one", "(1 + 1) ** (2 + 1)", " + ".join(["lr"] * 60)]  # fmt: skip
KEYS = [*STRINGS[:8], 1, True, 1.0, 0, None, math.inf, ("a", 1), ("b",)]


class GraphMaker:
    """Makes a random graph.

    Args:
        seed: the same seed makes the same graph.
        depth: how deep its values are nested.
    """

    def __init__(self, seed: int, depth: int = 4) -> None:
        self.random = Random(seed)
        self.pool: list[Node] = []
        self.depth = depth
        self.calcs = self.random.random() < 0.5

    def graph(self) -> Graph:
        """Returns a graph with two to six targets and up to two definitions."""
        count = self.random.randint(2, len(TARGETS))
        targets: dict[str, Entry] = {}
        definitions = tuple(Entry(f".{name}", self.node(self.depth)) for name in "xy"[: self.random.randrange(3)])
        for name in TARGETS[::-1][:count] if self.random.random() < 0.5 else TARGETS[:count]:
            targets[name] = Entry(name, self.node(self.depth))
        targets.setdefault("one", Entry("one", Scalar(value=3)))
        targets.setdefault("two", Entry("two", self.node(1)))
        targets.setdefault("main", Entry("main", self.node(self.depth)))
        anchors = {id(node): self.random.choice(["anchor", "model", "a-b"]) for node in self.pool[::4]}
        return Graph(targets=targets, definitions=definitions, anchors=anchors)

    def node(self, depth: int) -> Node:
        if self.pool and self.random.random() < 0.3:
            return self.random.choice(self.pool)
        if depth == 0 or self.random.random() < 0.25:
            return Scalar(value=self.random.choice(STRINGS + NUMBERS))
        makers = [self.call, self.call, self.call, self.short, self.sequence, self.mapping, self.variable, self.env]
        node = self.random.choice([*makers, self.calc] if self.calcs else makers)(depth - 1)
        self.pool.append(node)
        return node

    def kind(self) -> CallKind:
        return self.random.choice([CallKind.SINGLETON, CallKind.FACTORY, CallKind.PARTIAL])

    def call(self, depth: int) -> Node:
        constructor = self.random.choice(CONSTRUCTORS)
        search = None
        if self.random.random() < 0.15:
            constructor = self.random.choice([".blocks:Layer", "blocks.py:Layer", "m:A"])
            search = self.random.choice([Scalar(value="lib"), Sequence(kind=ContainerKind.LIST, items=(
                Scalar(value="lib"), Scalar(value="lib2"))), Env(text="LIB", default=Scalar(value="lib"))])  # fmt: skip
        return Call(
            kind=self.kind(),
            constructor=constructor,
            args=self.items(depth),
            kwargs=self.entries(KEYWORDS, depth),
            latent_args=self.entries(KEYWORDS, depth) if self.random.random() < 0.15 else (),
            submodule_searchpath=search,
            name=self.random.choice(NAMES),
        )

    def short(self, depth: int) -> Node:
        word = self.random.choice(
            ["items", "keys", "values", "getitem", "call", "named_list", "named_tuple", "named_dict"]
        )
        owner = Call(kind=self.random.choice([CallKind.SINGLETON, CallKind.FACTORY]), constructor="m:thing")
        args: tuple[Node, ...] = (owner,)
        if word == "getitem":
            args = (owner, self.node(0))
        elif word == "call":
            args = (owner, *self.items(depth))
        elif word.startswith("named"):
            args = () if word == "named_dict" else self.items(depth)
        kwargs = self.entries(KEYWORDS[:8], depth) if word in ("call", "named_dict") else ()
        if word == "getitem" and self.random.random() < 0.3:
            args, kwargs = (), (Entry("key", self.node(0)), Entry("container", owner))
        return Call(kind=self.kind(), constructor=word, args=args, kwargs=kwargs)

    def sequence(self, depth: int) -> Node:
        kind = self.random.choice([ContainerKind.LIST, ContainerKind.LIST, ContainerKind.TUPLE])
        tagged = kind is ContainerKind.TUPLE or self.random.random() < 0.3
        return Sequence(kind=kind, items=self.items(depth), tagged=tagged)

    def mapping(self, depth: int) -> Node:
        kind = self.random.choice([ContainerKind.DICT, ContainerKind.DICT, ContainerKind.DLIST])
        return Mapped(kind=kind, entries=self.entries(KEYS, depth), tagged=kind is ContainerKind.DLIST)

    def variable(self, depth: int) -> Node:
        default = self.node(depth) if self.random.random() < 0.8 else None
        return Var(text=self.random.choice(VARIABLES), default=default)

    def env(self, depth: int) -> Node:
        default = self.node(depth) if self.random.random() < 0.6 else None
        return Env(text=self.random.choice(["HOME_OF_IT", "TOKEN", "odd name"]), default=default)

    def calc(self, depth: int) -> Node:
        return Calc(text=self.random.choice(EXPRESSIONS))

    def items(self, depth: int) -> tuple[Node, ...]:
        return tuple(self.node(depth) for _ in range(self.random.randrange(4)))

    def entries(self, keys: list, depth: int) -> tuple[Entry, ...]:
        found: dict[str, Entry] = {}
        for key in self.random.choices(keys, k=self.random.randrange(4)):
            found.setdefault(repr(key), Entry(key, self.node(depth)))
        return tuple(found.values())
