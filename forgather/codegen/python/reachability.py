"""The nodes that targets need, and the number of places at which each node is used.

The input is a graph and the names of targets; the output is the needed nodes, and how construction treats each of them.
`is_one_object` and `is_built_per_call` give the same answers as `config.materialize`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forgather.config.calc import names_in, parse_calc
from forgather.config.graph import Calc, Call, CallKind, Container, Graph, Lookup, Node, is_one_object
from forgather.config.path import GraphPath, Key
from forgather.config.traverse import children, roots, shared_nodes
from forgather.config.yaml.events import Refusal


class Reach:
    """The part of a graph that targets need.

    Args:
        graph: the whole graph.
        targets: the names of the targets.
    """

    def __init__(self, graph: Graph, targets: Iterable[str]) -> None:
        self._graph = graph
        tops = [node for _, node in roots(graph)]
        # A root key counts as a use, because other targets and `!calc` expressions may refer to it.
        self._shared = shared_nodes(tops) | {id(node) for node in tops}
        self._live: dict[int, bool] = {}
        starts: list[tuple[GraphPath, Node]] = [((Key(name),), graph.target(name).value) for name in targets]
        self.nodes: list[tuple[GraphPath, Node]] = list(self._walk(starts))
        self.places: dict[int, int] = self._count([node for _, node in starts])

    def is_one_object(self, node: Node) -> bool:
        """Returns whether all uses of a node refer to one object."""
        return is_one_object(node, is_aliased=id(node) in self._shared)

    def is_reused(self, node: Node) -> bool:
        """Returns whether a node is built as one object that is used at several places."""
        return self.places[id(node)] > 1 and self.is_one_object(node)

    def is_built_per_call(self, node: Node) -> bool:
        """Returns whether each call of a partial builds a new object for a node."""
        if id(node) not in self._live:
            if isinstance(node, Call):
                self._live[id(node)] = node.kind is CallKind.FACTORY
            else:
                self._live[id(node)] = any(self.is_built_per_call(child) for _, child in children(node))
        return self._live[id(node)]

    def is_sometimes_per_call(self, node: Node) -> bool:
        """Returns whether some calls of a partial build a new object for a container, and others do not."""
        return isinstance(node, Container) and self.is_built_per_call(node) and not self._is_certainly_per_call(node)

    def _is_certainly_per_call(self, node: Node) -> bool:
        if isinstance(node, Container):
            return any(self._is_certainly_per_call(child) for _, child in children(node))
        return isinstance(node, Call) and self.is_built_per_call(node)

    def certain(self, targets: Iterable[str]) -> set[int]:
        """Returns the ids of the nodes that are built for all values of the variables."""
        found: set[int] = set()
        stack = [self._graph.target(name).value for name in targets]
        while stack:
            node = stack.pop()
            if id(node) not in found:
                found.add(id(node))
                stack += [] if isinstance(node, Lookup) else [child for _, child in children(node)]
        return found

    def _edges(self, node: Node) -> Iterator[tuple[GraphPath | None, Node]]:
        for step, child in children(node):
            yield (step,), child
        if isinstance(node, Calc):
            for word in calc_names(node):
                if word in self._graph.targets:
                    yield None, self._graph.targets[word].value

    def _walk(self, starts: list[tuple[GraphPath, Node]]) -> Iterator[tuple[GraphPath, Node]]:
        seen: set[int] = set()
        stack = starts[::-1]
        while stack:
            path, node = stack.pop()
            if id(node) not in seen:
                seen.add(id(node))
                yield path, node
                stack += [((*path, *(step or ())), child) for step, child in self._edges(node)][::-1]

    def _count(self, starts: list[Node]) -> dict[int, int]:
        """Returns the number of places at which each node is built, by the id of the node.

        A node that is one object builds its children once, even if it is used at several places.
        """
        open_edges = {id(node): 0 for _, node in self.nodes}
        for _, node in self.nodes:
            for _, child in self._edges(node):
                open_edges[id(child)] += 1
        places = dict.fromkeys(open_edges, 0)
        for node in starts:
            places[id(node)] += 1
        known = {id(node): node for _, node in self.nodes}
        ready = [node for key, node in known.items() if not open_edges[key]]
        while ready:
            node = ready.pop()
            # A partial builds new objects in addition to the one object of other uses.
            weight = 1 if self.is_one_object(node) and not self.is_built_per_call(node) else places[id(node)]
            for _, child in self._edges(node):
                places[id(child)] += weight
                open_edges[id(child)] -= 1
                if not open_edges[id(child)]:
                    ready.append(child)
        # Nodes behind a cycle are never ready; such a cycle is allowed if it goes through a default that is not built.
        return {key: max(2, count) if open_edges[key] else count for key, count in places.items()}


def calc_names(node: Calc) -> list[str]:
    """Returns the names that a `!calc` reads, each of them twice; an empty list if its expression is malformed.

    Each name is returned twice, because an expression may read it several times: a factory that is read twice is called
    twice, and a value that is used at two places gets a variable.
    """
    try:
        tree = parse_calc(node.expression)
    except Refusal:
        return []
    once = names_in(tree)
    return [*once, *once]
