"""Mistakes in one document that its reading can go on after.

Takes faults one by one, gives one error for all of them. Keeps true: the first fault is the error, the others go with
it; the reading ends at a fault that makes what follows something else than was meant.
"""

from __future__ import annotations

from forgather.config.graph import Node, Scalar
from forgather.errors import BudgetError, LoadError
from forgather.source import Origin

_MAX_FAULTS = 10


class Faults:
    """The faults of one document, and what stands where values are missing."""

    def __init__(self) -> None:
        self._found: list[LoadError] = []
        self._holes: dict[int, Node] = {}

    def __contains__(self, node: Node) -> bool:
        """Says whether a node stands for a value that could not be read."""
        return id(node) in self._holes

    def note(self, fault: LoadError | BudgetError, *, is_key: bool = False) -> None:
        """Keeps a fault for the end, or raises it where nothing that follows can be trusted."""
        # What follows a key or a tag that was read wrongly is not what was meant.
        if isinstance(fault, BudgetError) or is_key or fault.code == "FG211" or len(self._found) >= _MAX_FAULTS:
            raise fault
        self._found.append(fault)

    def hole(self, fault: LoadError | BudgetError, origin: Origin | None, *, is_key: bool) -> Node:
        """Keeps a fault, and returns what stands for the value until the end."""
        self.note(fault, is_key=is_key)
        node = Scalar(origin=origin, value=None)
        self._holes[id(node)] = node
        return node

    def joined(self, last: LoadError | None = None) -> LoadError | None:
        """Returns one error for all faults; None where there are none.

        Args:
            last: the fault that ended the reading.
        """
        faults = [*self._found, *([last] if last else [])]
        if not faults:
            return None
        first, *rest = faults
        first.others = (*first.others, *(found for fault in rest for found in (fault.diagnostic, *fault.others)))
        return first
