"""The seed of a construction: random numbers during the construction are drawn with the trainer's seed.

The input is a graph; the output is the function that `materialize` calls before the first constructor. The same config
builds the same objects in every process and at every start. A config without a seed is constructed without seeding.
After the construction, the random states of the caller are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from forgather.config.graph import Call, Graph, Scalar
from forgather.config.materialize import BeforeCalls
from forgather.config.path import GraphPath, Key
from forgather.errors import ForgatherError, GraphError, UnboundVarError
from forgather.project.metadata import ProjectMeta
from forgather.project.reader import reader_for
from forgather.project.trainer_arguments import keyword, trainer_arguments

USUAL_SEED = 42
"""The default seed in the trainer arguments of both transformers and Forgather."""

_BITS = 64


@contextmanager
def seeded_construction(graph: Graph, meta: ProjectMeta) -> Iterator[BeforeCalls]:
    """Context manager that yields a function which seeds Python, NumPy and torch, and restores their states afterwards.

    Args:
        graph: the graph that is built.
        meta: the project, which determines where modules are found.
    """
    with ExitStack() as given_back:

        def seed_all(build: Any) -> None:
            seed = _seed(graph, meta, build)
            if seed is not None:
                # This tower does not import torch, but a graph with a seed is built with torch, so the function is
                # found by name.
                module = import_module("forgather.ml.random_state")
                given_back.enter_context(module.seeded_random(seed))

        yield seed_all


def written_seed(graph: Graph, meta: ProjectMeta) -> int | None:
    """Returns the seed that a graph contains as a plain number, or the default seed of its trainer arguments.

    Returns None if the trainer arguments have no seed, or if their seed is known only after construction.

    Args:
        graph: the graph.
        meta: the project, which determines where modules are found.
    """
    call = _arguments(graph)
    node = keyword(call, "seed")
    default = getattr(node, "default", None)
    node = default if isinstance(default, Scalar) else node
    if isinstance(node, Scalar):
        return _valid_seed(node.value)
    return _default(call, meta) if call is not None and node is None else None


def _seed(graph: Graph, meta: ProjectMeta, build: Any) -> int | None:
    call = _arguments(graph)
    if call is None:
        return None
    node = keyword(call, "seed")
    if node is None:
        return _default(call, meta)
    path: GraphPath = (Key("trainer_args"), Key("seed"))
    try:
        seed = build(node, path)
    except UnboundVarError:
        # Another target can be built without a variable that only the trainer needs; building the trainer raises this
        # error itself.
        return _default(call, meta)
    whole = _valid_seed(seed)
    if seed is None or whole is not None:
        return whole
    raise GraphError(
        f"the seed of the trainer is {str(seed)[:80]!r}, which is not a whole number of {_BITS} bits",
        code="FG335",
        span=node.span,
        hint="give a number such as 42; with seed: ~, a class of your own sets no seed",
    )


def _valid_seed(value: object) -> int | None:
    """Returns the value if torch accepts it as a seed; None otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < 2**_BITS else None


def _arguments(graph: Graph) -> Call | None:
    found = trainer_arguments(graph)
    if found is not None:
        return found.call
    target = graph.targets.get("trainer_args")
    if target and isinstance(target.value, Call):
        return target.value
    # A trainer that takes its settings itself is an argument of what runs it, see trainers/lightning.yaml.
    main = graph.targets.get("main")
    trainer = keyword(main.value, "trainer") if main and isinstance(main.value, Call) else None
    return trainer if isinstance(trainer, Call) else None


def _default(call: Call, meta: ProjectMeta) -> int | None:
    """Returns the default of the parameter `seed`; None if the called constructor has no such parameter."""
    from forgather.signatures.results import Callee

    try:
        callee = reader_for(meta).read(call.constructor)
    except ForgatherError:
        return USUAL_SEED
    if not isinstance(callee, Callee) or len(callee.signatures) != 1:
        return USUAL_SEED
    parameters = callee.signatures[0].parameters
    if "seed" not in parameters:
        # `**kwargs` are passed on to trainer arguments, which all have this default.
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return USUAL_SEED if takes_any else None
    default = getattr(parameters["seed"].default, "value", None)
    whole = _valid_seed(default)
    return USUAL_SEED if whole is None and default is not None else whole
