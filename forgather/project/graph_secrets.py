"""Registers the secrets of a graph, so that texts which are shown or written later do not contain them.

A value is a secret if its name suggests it, even if an alias, a merge or an override puts the value there. Every node
is visited once.
"""

from __future__ import annotations

from collections.abc import Iterable

from forgather.config.graph import Call, Env, Graph, Mapped, Node, Scalar, Sequence, Var
from forgather.config.path import Key
from forgather.config.traverse import edges, roots
from forgather.redaction import note, remember
from forgather.secret_names import Strength, is_about, is_secret, is_variable, strength_of
from forgather.shown_secrets import parts_of


def note_graph(graph: Graph) -> None:
    """Registers each value of a graph whose name suggests a secret."""
    seen: set[int] = set()
    stack: list[Node] = []
    for path, node in roots(graph):
        _note_nested(str(path[-1].name) if isinstance(path[-1], Key) else "", node)
        stack.append(node)
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Env) and isinstance(node.default, Scalar):
            note(node.variable, node.default.value)
        if isinstance(node, Mapped):
            _note_option(node)
        if isinstance(node, Sequence | Call):
            _note_words(node.items if isinstance(node, Sequence) else node.args)
        for step, child, _ in edges(node):
            if isinstance(step, Key) and isinstance(step.name, str):
                _note_nested(step.name, child)
            if not isinstance(child, Scalar):
                stack.append(child)


def _note_option(record: Mapped) -> None:
    """Registers the default of an option, or the value of a record, if its name suggests a secret."""
    found = {entry.key: entry.value for entry in record.entries}
    default = found.get("default") or found.get("value")
    # A declared option has `names`, a record such as an HTTP header one of the others.
    names = next((found[key] for key in ("names", "name", "key", "header") if key in found), None)
    if isinstance(default, Scalar) and isinstance(default.value, str) and names is not None:
        for name in names.items if isinstance(names, Sequence) else (names,):
            if isinstance(name, Scalar) and isinstance(name.value, str):
                _note_value(name.value.lstrip("-"), default.value)


def _note_nested(name: str, node: Node) -> None:
    if strength_of(name) is Strength.NONE:
        return
    if isinstance(node, Scalar):
        if node.value is not None and not isinstance(node.value, bool):
            _note_value(name, str(node.value))
        return
    # A weak name says nothing about the values nested below it.
    if strength_of(name) is not Strength.STRONG:
        return
    # A stack instead of recursion, and each node once: aliases can make the number of paths exponential.
    seen: set[int] = set()
    stack: list[Node] = [node]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for step, child, _ in edges(node):
            key = str(step.name) if isinstance(step, Key) else ""
            if is_about(key):
                continue
            if not isinstance(child, Scalar):
                stack.append(child)
            elif isinstance(child.value, str | int | float) and not isinstance(child.value, bool):
                text = str(child.value)
                # `HF_TOKEN` as an argument names an environment variable and is not the secret.
                if not (is_variable(text) and isinstance(node, Call | Var)):
                    # The key of the value itself may be any word, so a name that suggests a secret is passed.
                    _note_value("password", text)


def _note_value(name: str, value: str) -> None:
    if is_secret(name, value):
        for part in parts_of(value):
            remember(part, name if is_secret(name, part) else "password")


def _note_words(nodes: Iterable[Node]) -> None:
    """Registers each word that follows an option in a list of words, if the name of the option suggests a secret."""
    option = ""
    for node in nodes:
        word = node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""
        if option and word and not word.startswith("-"):
            _note_value(option, word)
        option = word.lstrip("-") if word.startswith("-") and "=" not in word else ""
