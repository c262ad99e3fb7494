"""What can be said about a graph without building it.

Takes a graph, gives findings, all of them. Keeps true: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.config.calc import names_in, parse_calc
from forgather.config.events import Refusal
from forgather.config.graph import Calc, Call, Graph, Mapped, Node, Scalar, Sequence, Var
from forgather.config.path import GraphPath, format_path
from forgather.config.traverse import entries, roots, walk
from forgather.errors import Diagnostic, Severity, nearest


def check(graph: Graph) -> list[Diagnostic]:
    """Returns the findings about a graph: repeated `@name`s, `!calc` names, definitions that nothing uses."""
    nodes = list(walk(roots(graph)))
    return [*_repeated_names(nodes), *_calc_names(graph, nodes), *_unused_definitions(graph)]


def variable_names(graph: Graph) -> list[str]:
    """Returns the names that a construction may give values to: those of `!var` and those in `!calc`."""
    names: dict[str, None] = {}
    for _, node in walk(roots(graph)):
        if isinstance(node, Var):
            names[node.variable] = None
        elif isinstance(node, Calc):
            names.update(dict.fromkeys(_calc_reads(node)))
    return list(names)


def _repeated_names(nodes: list[tuple[GraphPath, Node]]) -> Iterator[Diagnostic]:
    first: dict[str, GraphPath] = {}
    for path, node in nodes:
        if not isinstance(node, (Call, Sequence, Mapped)) or node.name is None:
            continue
        if node.name in first:
            yield Diagnostic(
                code="FG231",
                message=f"the name @{node.name} is given to two nodes; the first is {format_path(first[node.name])}",
                severity=Severity.WARNING,
                span=node.span,
                path=format_path(path),
                hint="rename one, or use an alias if they should be one object",
            )
        first.setdefault(node.name, path)


def _calc_names(graph: Graph, nodes: list[tuple[GraphPath, Node]]) -> Iterator[Diagnostic]:
    variables = {node.variable for _, node in nodes if isinstance(node, Var)}
    for path, node in nodes:
        if not isinstance(node, Calc):
            continue
        try:
            names = names_in(parse_calc(node.expression))
        except Refusal as refusal:
            yield _at(node, path, refusal.code, refusal.message, Severity.ERROR, refusal.hint)
            continue
        for name in names:
            if name not in variables and name not in graph.targets:
                message = f"!calc reads {name!r}, which is no target and no !var of this config"
                hint = nearest(name, [*variables, *graph.targets]) or f"pass {name}=... when it is built"
                yield _at(node, path, "FG232", message, Severity.WARNING, hint)


def _calc_reads(node: Calc) -> list[str]:
    try:
        return names_in(parse_calc(node.expression))
    except Refusal:
        return []


def _at(node: Node, path: GraphPath, code: str, message: str, severity: Severity, hint: str | None) -> Diagnostic:
    return Diagnostic(code=code, message=message, severity=severity, span=node.span, path=format_path(path), hint=hint)


def _reached(graph: Graph) -> set[int]:
    """Returns the ids of the nodes that targets hold, and of aliased or merged ones that another key replaced."""
    tops = list(graph.targets.values())
    held = [entry for _, node in walk([((), top.value) for top in tops]) for entry in entries(node)]
    named = [old for entry in (*tops, *held) for old in entry.replaced if old.alias is not None]
    return {id(node) for _, node in walk([((), entry.value) for entry in (*tops, *named)])}


def _unused_definitions(graph: Graph) -> Iterator[Diagnostic]:
    reached = _reached(graph)
    for entry in graph.definitions:
        inside = [node for _, node in walk([((), entry.value)])]
        if isinstance(entry.value, Scalar) and entry.value.value is None:
            continue
        if not any(id(node) in reached for node in inside):
            yield Diagnostic(
                code="FG230",
                message=f"nothing uses the definition {entry.key!r}",
                severity=Severity.LINT,
                span=entry.span,
                path=str(entry.key),
                hint="remove it, or drop the '.' to make it a target",
            )
