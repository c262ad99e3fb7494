"""The parameter of every check: a loaded config with its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forgather.config.graph import Graph
from forgather.config.lint.call_check import Called
from forgather.project.project import Project
from forgather.signatures.reader import Reader


@dataclass(frozen=True, slots=True)
class Subject:
    """A config whose graph is loaded and whose calls are known.

    Args:
        project: the config, with its options and overrides.
        graph: the graph of the project.
        calls: all calls that do not certainly fail, by `id(node)`.
        reader: the reader of signatures.
    """

    project: Project
    graph: Graph
    calls: Mapping[int, Called]
    reader: Reader
