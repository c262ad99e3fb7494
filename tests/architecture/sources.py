"""The sources of the package, each read and parsed once for all tests of this folder.

Gives modules by dotted name, and what of them a rule does not hold for. A test passes over all of them: an item for
each would cost more than what it looks at.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "forgather"


class Source:
    """A module of the package."""

    def __init__(self, file):
        self.file = file
        self.path = str(file.relative_to(ROOT))
        self.text = file.read_text()
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def of(self, *kinds):
        """Returns the nodes of some kinds."""
        return [node for node in self.nodes if isinstance(node, kinds)]


@functools.cache
def sources():
    """Returns all modules of the package."""
    return [Source(file) for file in sorted(PACKAGE.rglob("*.py"))]


def faults(rule):
    """Returns {path: what the rule says} for each module that it says something about."""
    return {source.path: said for source in sources() if (said := rule(source))}
