"""Generates YAML from a graph.

The input is a graph; the output is YAML without templates, merge keys or duplicate keys. Loading this YAML gives an
equal graph in which the same nodes are shared. The value of an `!env` is not read: the tag itself is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from forgather.config.anchor_names import anchor_names
from forgather.config.graph import SPREAD, Call, Container, Entry, Graph, Lookup, Node, Scalar, Sequence, word_of
from forgather.config.path import Key, PlainKey
from forgather.config.traverse import entries
from forgather.config.yaml.node_builders import is_positional
from forgather.config.yaml.scalar_text import key_text, quoted, scalar_text

_RESERVED = frozenset(("submodule_searchpath", "latent_args"))
_EXPLICIT = frozenset(("args", "kwargs"))
# A longer key is written after `? `: YAML limits the length of a key in front of a colon.
_LONG_KEY = 100
# A block scalar that begins with a space or an empty line would need an indentation indicator.
_BLOCK_TEXT = re.compile(r"(?![ \n])(?:[ -~\u00a1-\u024f]*\n)+(?:[ -~\u00a1-\u024f]*)")


def emit_yaml(graph: Graph) -> str:
    """Returns YAML text that loads as a graph equal to `graph`; the definitions come before the targets.

    Raises:
        GraphError: FG330 if YAML cannot represent a string.
    """
    entries = (*graph.definitions, *graph.targets.values())
    tops = [((Key(entry.key),), entry.value) for entry in entries]
    emitter = _Emitter(anchor_names(graph, tops))
    lines = [line for entry in entries for line in emitter.entry(entry)]
    return "\n".join(lines) + "\n" if lines else "{}\n"


class _Emitter:
    """Converts each node to two parts: the text after `key:` or `-`, and the lines below it, not indented."""

    def __init__(self, anchors: dict[int, str]) -> None:
        self._anchors = anchors
        self._written: set[int] = set()

    def entry(self, entry: Entry) -> list[str]:
        return self._pair(entry.key, *self._node(entry.value))

    def _node(self, node: Node) -> tuple[str, list[str]]:
        if isinstance(node, Scalar):
            return _scalar(node)
        anchor = self._anchors.get(id(node))
        if id(node) in self._written and anchor:
            return f"*{anchor}", []
        self._written.add(id(node))
        tag = _tag(node)
        head, body = self._payload(node)
        return " ".join(part for part in (f"&{anchor}" if anchor else "", tag, head) if part), body

    def _payload(self, node: Node) -> tuple[str, list[str]]:
        if isinstance(node, Call):
            return "", self._arguments(node)
        if isinstance(node, Lookup):
            if node.default is None:
                return quoted(node.text) if node.is_expression else scalar_text(node.text), []
            return "", [f"name: {scalar_text(node.text)}", *self._pair("default", *self._node(node.default))]
        if isinstance(node, Sequence):
            return ("", self._items(node.items)) if node.items else ("[]", [])
        return ("", self._entries(entries(node))) if entries(node) else ("{}", [])

    def _arguments(self, node: Call) -> list[str]:
        plain = not node.latent_args and node.submodule_searchpath is None
        if plain and not node.kwargs:
            return self._items(node.args)
        lines: list[str] = []
        if node.args or _is_ambiguous(node.kwargs):
            if node.args:
                lines += ["args:", *_indented(self._items(node.args))]
            if node.kwargs:
                lines += ["kwargs:", *_indented(self._entries(node.kwargs))]
        else:
            lines += self._entries(node.kwargs)
        if node.submodule_searchpath is not None:
            lines += self._pair("submodule_searchpath", *self._node(node.submodule_searchpath))
        if node.spread is not None:
            lines += self._pair(SPREAD, *self._node(node.spread))
        elif node.latent_args:
            lines += ["latent_args:", *_indented(self._entries(node.latent_args))]
        return lines

    def _items(self, items: Iterable[Node]) -> list[str]:
        lines: list[str] = []
        for item in items:
            head, body = self._node(item)
            if not head and body:
                lines += [f"- {body[0]}", *_indented(body[1:])]
            else:
                lines += [f"- {head}", *_indented(body)]
        return lines

    def _entries(self, entries: Iterable[Entry]) -> list[str]:
        return [line for entry in entries for line in self.entry(entry)]

    def _pair(self, key: PlainKey, head: str, body: list[str]) -> list[str]:
        text = key_text(key)
        if len(text) > _LONG_KEY or isinstance(key, tuple):
            return [f"? {text}", f": {head}".rstrip(), *_indented(body)]
        return [f"{text}: {head}".rstrip(), *_indented(body)]


def _scalar(node: Scalar) -> tuple[str, list[str]]:
    value = node.value
    if not isinstance(value, str) or "\n" not in value or not _BLOCK_TEXT.fullmatch(value):
        return scalar_text(value), []
    lines = value.split("\n")
    if any(line and not line.strip() for line in lines):
        return scalar_text(value), []
    stripped = value.rstrip("\n")
    style = "|-" if stripped == value else "|" if value == stripped + "\n" else "|+"
    return style, lines[:-1] if style != "|-" else lines


def _tag(node: Node) -> str:
    if isinstance(node, Call):
        return f"!{node.kind}:{_escaped(node.constructor)}{_name_suffix(node.name)}"
    if isinstance(node, Container) and node.is_plain:
        return ""
    return f"!{word_of(node)}{':' if node.name else ''}{_name_suffix(node.name)}"


def _name_suffix(name: str | None) -> str:
    return f"@{_escaped(name)}" if name else ""


def _escaped(text: str) -> str:
    # A tag is a URI, in which other characters have to be percent-encoded.
    return quote(text, safe="/:.@_-")


def _is_ambiguous(kwargs: tuple[Entry, ...]) -> bool:
    """Returns whether a mapping with these keys would be read as something other than keyword arguments."""
    keys = [str(entry.key) for entry in kwargs]
    if keys and all(key in _EXPLICIT for key in keys):
        return True
    return any(key in _RESERVED or is_positional(key) for key in keys)


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else line for line in lines]
