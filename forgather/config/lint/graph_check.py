"""Checks of a graph that need no constructor: repeated names of nodes, `!calc` expressions, unused definitions.

The input is a graph; the output is all findings. Invariant: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from forgather.config.calc import names_in, parse_calc
from forgather.config.graph import Calc, Call, Graph, Lookup, Node, Var, is_null
from forgather.config.path import GraphPath, Key, format_path
from forgather.config.traverse import all_nodes, children, entries, walk
from forgather.config.yaml.events import Refusal
from forgather.errors import Diagnostic, Severity, nearest


def check_graph(graph: Graph) -> list[Diagnostic]:
    """Returns the findings about duplicate `@name`s, unknown names and cycles in `!calc`, and unused definitions."""
    nodes = all_nodes(graph)
    return [
        *_repeated_names(nodes),
        *_calc_names(graph, nodes),
        *_calc_circles(graph, nodes),
        *_unused_definitions(graph),
    ]


def _repeated_names(nodes: Collection[tuple[GraphPath, Node]]) -> Iterator[Diagnostic]:
    first: dict[str, GraphPath] = {}
    for path, node in nodes:
        if node.name is None:
            continue
        if node.name in first:
            message = f"the name @{node.name} is given to two nodes; the first is {format_path(first[node.name])}"
            hint = "rename one, or use an alias if they should be one object"
            yield _finding(node, path, "FG231", message, Severity.WARNING, hint)
        # The first stays the reference for all later ones.
        first.setdefault(node.name, path)


def _calc_names(graph: Graph, nodes: Collection[tuple[GraphPath, Node]]) -> Iterator[Diagnostic]:
    variables = {node.variable for _, node in nodes if isinstance(node, Var)}
    for path, node in nodes:
        if not isinstance(node, Calc):
            continue
        try:
            names = names_in(parse_calc(node.expression))
        except Refusal as refusal:
            yield _finding(node, path, refusal.code, refusal.message, Severity.ERROR, refusal.hint)
            continue
        for name in names:
            # Only a warning: the name may be given as a variable at construction.
            if name not in variables and name not in graph.targets:
                message = f"!calc reads {name!r}, which is neither a target nor a !var of this config"
                hint = nearest(name, [*variables, *graph.targets]) or f"pass {name}=... when it is built"
                yield _finding(node, path, "FG232", message, Severity.WARNING, hint)


def _calc_circles(graph: Graph, nodes: Collection[tuple[GraphPath, Node]]) -> Iterator[Diagnostic]:
    """Yields an error for each cycle of targets whose `!calc` expressions read one another."""
    # Most configs have no !calc, and the tables below cost a walk per target.
    if not any(isinstance(node, Calc) for _, node in nodes):
        return
    variables = {node.variable for _, node in nodes if isinstance(node, Var)}
    reads = {
        name: {read: calc for calc in _calcs(entry.value) for read in _calc_reads(calc) if read not in variables}
        for name, entry in graph.targets.items()
    }
    reported: set[str] = set()
    for name in _on_circles(reads):
        # One error per cycle, however many targets are on it.
        circle = None if name in reported else _shortest_circle(name, reads)
        # A target that only leads to a cycle, or is on a reported one, is not a further error.
        if circle is None or reported.intersection(circle):
            continue
        reported.update(circle)
        calc = reads[name][circle[1]]
        way = f" ({' -> '.join(circle)})" if len(circle) > 2 else ""
        message = f"!calc reads {circle[1]!r}, which is computed from it{way}"
        hint = "break the cycle with a !var or a plain value"
        yield _finding(calc, (Key(name),), "FG304", message, Severity.ERROR, hint)


def _calcs(node: Node) -> Iterator[Calc]:
    """Yields the expressions that are always evaluated when a node is built, which excludes those inside a partial."""
    stack, met = [node], set()
    while stack:
        current = stack.pop()
        if id(current) in met:
            continue
        met.add(id(current))
        if isinstance(current, Calc):
            yield current
        # A default may never be needed, and a partial is called later, when the target exists.
        elif not isinstance(current, Lookup) and not (isinstance(current, Call) and not current.kind.gives_result):
            stack.extend(child for _, child in children(current))


def _on_circles(reads: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the targets that are on a cycle of reads or lead to one, which a topological sort cannot order."""
    waits = {name: len([read for read in read_names if read in reads]) for name, read_names in reads.items()}
    readers: dict[str, list[str]] = {name: [] for name in reads}
    for name, read_names in reads.items():
        for read in read_names:
            if read in reads:
                readers[read].append(name)
    # Kahn's algorithm: targets whose reads are all known are removed until only cycles are left.
    known = [name for name, count in waits.items() if not count]
    for name in known:
        for reader in readers[name]:
            waits[reader] -= 1
            if not waits[reader]:
                known.append(reader)
    return [name for name, count in waits.items() if count]


def _shortest_circle(start: str, reads: Mapping[str, Collection[str]]) -> list[str] | None:
    """Returns the shortest cycle of reads from a target to itself, with both ends; None if there is no cycle."""
    came_from: dict[str, str] = {}
    waiting = [start]
    for name in waiting:
        for read in reads.get(name, ()):
            if read == start:
                way = [start]
                while name != start:
                    way.append(name)
                    name = came_from[name]
                return [start, *way[:0:-1], start]
            if read not in came_from:
                came_from[read] = name
                waiting.append(read)
    return None


def _calc_reads(node: Calc) -> list[str]:
    try:
        return names_in(parse_calc(node.expression))
    except Refusal:
        return []


def _finding(node: Node, path: GraphPath, code: str, message: str, severity: Severity, hint: str | None) -> Diagnostic:
    return Diagnostic(code=code, message=message, severity=severity, span=node.span, path=format_path(path), hint=hint)


def _reached(graph: Graph) -> set[int]:
    """Returns the ids of all nodes in targets, and in aliased or merged values that another key replaced."""
    tops = list(graph.targets.values())
    held = [entry for _, node in walk([((), top.value) for top in tops]) for entry in entries(node)]
    # A definition whose every key is overridden is still used: removing it would break the alias or merge.
    named = [old for entry in (*tops, *held) for old in entry.replaced if old.alias is not None]
    return {id(node) for _, node in walk([((), entry.value) for entry in (*tops, *named)])}


def _unused_definitions(graph: Graph) -> Iterator[Diagnostic]:
    reached = _reached(graph)
    for entry in graph.definitions:
        inside = [node for _, node in walk([((), entry.value)])]
        # A null has no part that anything could use.
        if is_null(entry.value):
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
