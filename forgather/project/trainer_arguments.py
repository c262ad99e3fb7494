"""The trainer's arguments: the call that is the argument `args` of `main`.

The input is a graph; the output is the settings in that call, and their paths for `--set`. Trainer arguments are
recognized only if the graph contains them as a call, because any other value is known only after construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forgather.batch_triangle import GLOBAL, engine_total
from forgather.config.graph import Call, Entry, Graph, Mapped, Node, Scalar, is_null
from forgather.config.insight.path_lookup import path_text
from forgather.config.traverse import walk_places
from forgather.errors import ProjectError
from forgather.project.literal import plain_value


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    """The arguments of a trainer.

    Args:
        graph: the graph of the config.
        call: the call that constructs the trainer's arguments.
    """

    graph: Graph
    call: Call

    def get(self, name: str) -> Node | None:
        """Returns the node of a setting; None if the setting is not given."""
        return keyword(self.call, name)

    def entry(self, name: str) -> Entry | None:
        """Returns the entry of a setting, with its location; None if the setting is not given."""
        return next((entry for entry in self.call.kwargs if entry.key == name), None)

    def plain(self, name: str) -> object:
        """Returns the value of a setting; None if the setting is not given, or is not a plain scalar."""
        node = self.get(name)
        return node.value if isinstance(node, Scalar) else None

    def global_batch(self) -> int | None:
        """Returns `global_batch_size`, or else `train_batch_size` of a DeepSpeed mapping; None without a number."""
        total = self.plain(GLOBAL)
        if isinstance(total, int):
            return total
        node = self.get("deepspeed")
        try:
            return None if node is None else engine_total({"deepspeed": plain_value(node, "deepspeed")})
        except ProjectError:
            return None

    def without_global_batch(self) -> dict[str, object]:
        """Returns the settings with which nothing gives the rows of an update; empty if nothing does."""
        free: dict[str, object] = {} if self.plain(GLOBAL) is None else {GLOBAL: None}
        node = self.get("deepspeed")
        if self.global_batch() is None or not isinstance(node, Mapped):
            return free
        config = plain_value(node, "deepspeed")
        assert isinstance(config, Mapping)  # noqa: S101 - of such a node
        return free | {"deepspeed": {key: value for key, value in config.items() if key != "train_batch_size"}}

    @property
    def is_pipeline(self) -> bool:
        """Whether the trainer cuts the model into pipeline stages."""
        return self.call.constructor.endswith(":PipelineTrainingArguments")

    def replicas(self, processes: int) -> int:
        """Returns the number of data-parallel ranks of a run with some processes, which are 1 at least."""
        inner = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        sizes = [self.plain(name) for name in inner]
        if self.is_pipeline and not isinstance(sizes[1], int):
            # A pipeline takes all processes that other sizes leave.
            given = self.plain("data_parallel_size")
            return given if isinstance(given, int) else 1
        for size in sizes:
            # A size below 1 is a mistake of its own.
            processes //= size if isinstance(size, int) and size > 0 else 1
        return max(1, processes)

    def path(self, name: str) -> str:
        """Returns the path of a setting for `--set`, with the prefix `+` if the setting is not given."""
        return f"{'' if self.get(name) else '+'}{path_of(self.graph, self.call)}.{name}"


def path_of(graph: Graph, wanted: Node) -> str:
    """Returns the first path of a node in a graph, as `--set` takes it.

    Args:
        graph: the graph.
        wanted: a node of the graph.
    """
    return next(path_text(place) for place, node in walk_places(graph) if node is wanted)


def trainer_arguments(graph: Graph) -> TrainerArguments | None:
    """Returns the trainer's arguments of `main`; None if `main` has none."""
    main = graph.targets.get("main")
    call = _arguments_of_main(main.value) if main else None
    return TrainerArguments(graph, call) if isinstance(call, Call) else None


def _arguments_of_main(main: Node) -> Node | None:
    # Every trainer takes the model first, and its arguments second.
    by_place = main.args[1] if isinstance(main, Call) and len(main.args) > 1 else None
    return keyword(main, "args") or by_place


def model_of_main(graph: Graph) -> tuple[str, Node] | None:
    """Returns the argument that gives `main` its model, "model" or "model_init", and its node; None if there is none.

    Args:
        graph: the graph of the config.
    """
    entry = graph.targets.get("main")
    main = entry.value if entry else None
    by_place = main.args[0] if isinstance(main, Call) and main.args else None
    given = [("model", keyword(main, "model") or by_place), ("model_init", keyword(main, "model_init"))]
    return next(((name, node) for name, node in given if node is not None and not is_null(node)), None)


def keyword(node: Node | None, name: str) -> Node | None:
    """Returns the node of a keyword argument; None if the argument is not given, or the node is not a call.

    Args:
        node: the call.
        name: the name of the keyword argument.
    """
    entries = node.kwargs if isinstance(node, Call) else ()
    return next((entry.value for entry in entries if entry.key == name), None)
