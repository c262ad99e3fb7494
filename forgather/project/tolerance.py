"""What a config says of a run that fails: how often it is started again, and what it goes on from.

Takes a graph; gives `FaultTolerance`, and assignments as `--set` takes them. Keeps true: what it changes are values of
the graph like any other, so they are checked, and kept in the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgather.config.graph import Graph, Mapped, Node, Scalar
from forgather.config.yaml.node_builders import describe
from forgather.errors import ProjectError, nearest
from forgather.project.plain import string_entries
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments
from forgather.rule_conditions import misfit

KEY = "fault_tolerance"
_RULES: dict[str, Mapping[str, Any]] = {
    "auto_resume": {"type": "flag"},
    "max_retry_attempts": {"type": "whole", "minimum": 0, "maximum": 1000},
    "checkpoint_interval": {
        "type": "whole",
        "minimum": 1,
        "maximum": 10**12,
        "optional": True,
        "expected": "a whole number from 1",
    },
}


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """What happens to a run that fails.

    Args:
        auto_resume: whether it goes on from its newest intact checkpoint when it is started again.
        max_retry_attempts: how often it is started again.
        checkpoint_interval: steps between checkpoints where the arguments of the trainer save none; None leaves that.
    """

    auto_resume: bool = True
    max_retry_attempts: int = 3
    checkpoint_interval: int | None = None


def fault_tolerance(graph: Graph) -> FaultTolerance | None:
    """Returns `fault_tolerance` of the target `meta`; None where there is none.

    Raises:
        ProjectError: FG640, it is not what it may be.
    """
    meta = graph.targets.get("meta")
    entry = next((entry for entry in string_entries(meta.value) if entry.key == KEY), None) if meta else None
    if entry is None or (isinstance(entry.value, Scalar) and entry.value.value is None):
        return None
    if not isinstance(entry.value, Mapped):
        raise _wrong(f"is {_shown(entry.value)}", entry.span, "write a mapping, as in {max_retry_attempts: 3}")
    values: dict[str, Any] = {}
    for one in entry.value.entries:
        name = str(one.key)
        if one.key not in _RULES:
            raise _wrong(f"has no setting {one.key!r}", one.span, nearest(name, list(_RULES)))
        values[name] = one.value.value if isinstance(one.value, Scalar) else one.value
        if expected := misfit(values[name], _RULES[name]):
            raise _wrong(f"has {name}: {_shown(one.value)}", one.span, f"write {expected}")
    return FaultTolerance(**values)


def _shown(node: Node) -> str:
    return repr(node.value)[:80] if isinstance(node, Scalar) else describe(node)


def _wrong(found: str, span: Any, hint: str | None) -> ProjectError:
    return ProjectError(f"{KEY!r} of target 'meta' {found}", code="FG640", span=span, path=f"meta.{KEY}", hint=hint)


def assignments(graph: Graph, tolerance: FaultTolerance | None, *, goes_on: bool) -> tuple[tuple[str, str], ...]:
    """Returns pairs of path and YAML text for the arguments of the trainer.

    Args:
        graph: of the config.
        tolerance: of the config; None where it says nothing.
        goes_on: whether this is a further attempt, which goes on from the newest checkpoint.
    """
    arguments = trainer_arguments(graph)
    if arguments is None:
        return ()
    interval = None if tolerance is None else tolerance.checkpoint_interval
    wanted = {} if interval is None else _missing(arguments, interval)
    if goes_on:
        wanted["resume_from_checkpoint"] = '"auto"'
    return tuple((arguments.path(name), text) for name, text in wanted.items())


def _missing(arguments: TrainerArguments, interval: int) -> dict[str, str]:
    strategy = arguments.get("save_strategy")
    says = strategy.value if isinstance(strategy, Scalar) else "no" if strategy is None else "steps"
    if says in ("no", None):
        return {"save_strategy": '"steps"', "save_steps": str(interval)}
    return {"save_steps": str(interval)} if says == "steps" and arguments.get("save_steps") is None else {}
