"""Any text gives a graph or a located error; a graph written as YAML reads back as itself."""

from __future__ import annotations

import math
from random import Random

import pytest
from documents import graph_of, rendered
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.equality import same_graph
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
from forgather.config.load import load
from forgather.config.yaml.events import Refusal
from forgather.config.yaml.scalars import resolve_scalar
from forgather.errors import ForgatherError

PIECES = st.sampled_from(
    ["a", "b: ", "\n", "  ", " ", "- ", "? ", ": ", "&x ", "*x", "*y", "<<: ", "!call:int ", "!list ", "!singleton:a:b",
     "!var ", "!calc ", "!env ", "!!int ", "!dlist ", "[", "]", "{", "}", ",", '"', "'", "|", ">", "#", "%", "@n", "1",
     "0x1", "-.5", "~", "=", "---", "...", "\t", "\x85", "\u2028", "\ud800", "\x00", "\ufeff", "é", "2001-01-01",
     "args: ", "kwargs: ", "arg0: ", "latent_args: ", "name: ", "default: "]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=80)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_any_text_gives_a_graph_or_a_located_error(text):
    try:
        graph = load(rendered(text))
    except ForgatherError as error:
        assert error.span is not None
        assert "\n" not in error.message
        assert error.code.startswith("FG2")
    else:
        assert isinstance(graph, Graph)


NUMBERISH = st.text("0123456789-+._eExXobinfaINFNAtruTRUE~=:TZ ", max_size=12)


@settings(max_examples=200, deadline=None)
@given(NUMBERISH | st.sampled_from(["017", "0o17", "1e3", "1e-3", "yes", "1_000", "0b11", "12:30:45", ".5e+3", "Null"]))
def test_plain_scalars_have_the_value_that_ruamel_gives_them(text):
    if text != text.strip() or text.startswith(("-", "?", ":")) and (text[1:2] in ("", " ")):
        return
    loader = YAML(typ="safe", pure=False)
    loader.version = (1, 2)
    try:
        expected = loader.load(f"[{text}]")
    except (YAMLError, ValueError, IndexError, KeyError):
        return
    if not isinstance(expected, list) or len(expected) != 1 or ": " in text or text.endswith(":"):
        return
    try:
        actual = resolve_scalar(text)
    except Refusal:
        assert text == "=" or type(expected[0]).__name__ in ("date", "datetime", "TimeStamp")
        return
    assert type(expected[0]) is type(actual)
    assert expected[0] == actual or (math.isnan(expected[0]) and math.isnan(actual))


STRINGS = ["", "a", "two words", "1e-3", "yes", "~", "null", "a: b", "a #b", "- x", "a\nb\n", "a\n\nb", "\na", " a\n",
           "a \nb", "...", "---", "<<", "2001-01-01", "=", "0x10", "x\ty\n", "trail\n\n", "\u00e9\n", "\ufeff", "a:", "#",
           "!x", "&a", "*a", "%", "@", "`", "\x85", "\u2028", "\x00", "\r", "\U0001f600", "'", '"', "\\", "-", "?", ":",
           "[", "{", ",", "|", ">", "kind", "ref", "args", "kwargs", "arg0", "arg01", "self", "name", "default",
           "latent_args", "submodule_searchpath", "a" * 200, "/a/b", ".a", "c:d", "x \n", " \nb", "\u00a0x\n"]  # fmt: skip
NUMBERS = [0, -1, 10**30, 1.5, -0.0, 1e-5, 1e300, math.inf, -math.inf, math.nan, True, False, None]
NAMES = [None, None, "name", "a.b", "x-1"]
CONSTRUCTORS = ["torch:nn.Linear", "int", "dict", "a/b%c.py:x", ".mod:sym", "m:a.b", "a-b:c", "m:a;b"]


class GraphMaker:
    """Makes a random graph in which values are shared."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pool: list[Node] = []

    def graph(self) -> Graph:
        targets = self.entries([text for text in STRINGS if not text.startswith(".")], 4)
        definitions = self.entries([f".{text}" for text in STRINGS], 3)
        return Graph(targets={entry.key: entry for entry in targets}, definitions=definitions)

    def node(self, depth: int) -> Node:
        if self.pool and self.random.random() < 0.2:
            return self.random.choice(self.pool)
        if depth == 0 or self.random.random() < 0.35:
            return Scalar(value=self.random.choice(STRINGS + NUMBERS))
        node = self.random.choice([self.call, self.sequence, self.mapping, self.value])(depth - 1)
        self.pool.append(node)
        return node

    def call(self, depth: int) -> Node:
        return Call(
            kind=self.random.choice(list(CallKind)),
            constructor=self.random.choice(CONSTRUCTORS),
            args=self.items(depth),
            kwargs=self.entries(STRINGS, depth),
            latent_args=self.entries(STRINGS, depth) if self.random.random() < 0.2 else (),
            submodule_searchpath=self.node(depth) if self.random.random() < 0.2 else None,
            name=self.random.choice(NAMES),
        )

    def sequence(self, depth: int) -> Node:
        if self.random.random() < 0.5:
            return Sequence(kind=ContainerKind.LIST, items=self.items(depth))
        kind = self.random.choice([ContainerKind.LIST, ContainerKind.TUPLE])
        return Sequence(kind=kind, items=self.items(depth), name=self.random.choice(NAMES), tagged=True)

    def mapping(self, depth: int) -> Node:
        keys = [*STRINGS, *NUMBERS, ("a", 1), ("~", None), ("a b", "c,d")]
        if self.random.random() < 0.5:
            return Mapped(kind=ContainerKind.DICT, entries=self.entries(keys, depth))
        kind = self.random.choice([ContainerKind.DICT, ContainerKind.DLIST])
        return Mapped(kind=kind, entries=self.entries(keys, depth), name=self.random.choice(NAMES), tagged=True)

    def value(self, depth: int) -> Node:
        text = self.random.choice([text for text in STRINGS if text.strip() and "=" not in text and "\0" not in text])
        default = self.node(depth) if self.random.random() < 0.5 else None
        return self.random.choice([Var(text=text, default=default), Env(text=text, default=default), Calc(text=text)])

    def items(self, depth: int) -> tuple[Node, ...]:
        return tuple(self.node(depth) for _ in range(self.random.randrange(3)))

    def entries(self, keys: list, depth: int) -> tuple[Entry, ...]:
        chosen = {key: None for key in self.random.choices(keys, k=self.random.randrange(4))}
        return tuple(Entry(key, self.node(depth)) for key in chosen)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_a_graph_written_as_yaml_reads_back_as_itself(seed):
    graph = GraphMaker(seed).graph()
    if not graph.targets and not graph.definitions:
        return
    text = emit_yaml(graph)
    assert same_graph(graph, graph_of(text)), text


def test_a_string_that_yaml_cannot_hold_is_an_error_not_a_wrong_text():
    graph = Graph(targets={"a": Entry("a", Scalar(value="\ud800"))})
    with pytest.raises(ForgatherError, match=r"\[FG330\] a string contains U\+D800, half of a surrogate pair"):
        emit_yaml(graph)
