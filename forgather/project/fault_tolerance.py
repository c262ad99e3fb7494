"""Fault tolerance and resuming: what happens to a run that fails, and which checkpoint a run resumes from.

The input is a graph and the options `--resume`, `--allow-missing` and `--allow-changed`; the output is
`FaultTolerance`, and assignments in the form of `--set`. These assignments change ordinary values of the graph, so they
are checked, and recorded in the run's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.config.graph import Graph, Mapped, Node, Scalar, describe
from forgather.errors import CheckpointError, ProjectError, nearest
from forgather.project.literal import string_entries
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
        auto_resume: whether a restarted run resumes from its newest intact checkpoint.
        max_retry_attempts: how often the processes are started again.
        checkpoint_interval: the number of steps between checkpoints if the trainer's arguments do not determine one;
            None to leave the trainer's arguments unchanged.
    """

    auto_resume: bool = True
    max_retry_attempts: int = 3
    checkpoint_interval: int | None = None


def fault_tolerance(graph: Graph) -> FaultTolerance | None:
    """Returns the setting `fault_tolerance` of the target `meta`; None if the config does not have this setting.

    Raises:
        ProjectError: FG640 if the setting contains an unknown name or a wrong value.
    """
    meta = graph.targets.get("meta")
    entry = next((entry for entry in string_entries(meta.value) if entry.key == KEY), None) if meta else None
    if entry is None or (isinstance(entry.value, Scalar) and entry.value.value is None):
        return None
    if not isinstance(entry.value, Mapped):
        raise _wrong_setting(
            f"is {_shown_value(entry.value)}", entry.span, "write a mapping, as in {max_retry_attempts: 3}"
        )
    values: dict[str, Any] = {}
    for one in entry.value.entries:
        name = str(one.key)
        if one.key not in _RULES:
            raise _wrong_setting(f"has no setting {one.key!r}", one.span, nearest(name, list(_RULES)))
        # Any other node violates the rule, and the error describes it.
        values[name] = one.value.value if isinstance(one.value, Scalar) else one.value
        if expected := misfit(values[name], _RULES[name]):
            raise _wrong_setting(f"has {name}: {_shown_value(one.value)}", one.span, f"write {expected}")
    return FaultTolerance(**values)


def _shown_value(node: Node) -> str:
    return repr(node.value)[:80] if isinstance(node, Scalar) else describe(node)


def _wrong_setting(found: str, span: Any, hint: str | None) -> ProjectError:
    return ProjectError(f"{KEY!r} of target 'meta' {found}", code="FG640", span=span, path=f"meta.{KEY}", hint=hint)


def restart_assignments(
    graph: Graph, tolerance: FaultTolerance | None, *, resumes: bool
) -> tuple[tuple[str, str], ...]:
    """Returns the changes of the trainer's arguments for fault tolerance, as pairs of graph path and YAML text.

    Args:
        graph: the config's graph.
        tolerance: the config's fault tolerance; None if the config has none.
        resumes: whether the run is a further attempt, which resumes from the newest checkpoint.
    """
    arguments = trainer_arguments(graph)
    if arguments is None:
        return ()
    interval = None if tolerance is None else tolerance.checkpoint_interval
    wanted = {} if interval is None else _missing(arguments, interval)
    if resumes:
        wanted["resume_from_checkpoint"] = '"auto"'
    return tuple((arguments.path(name), text) for name, text in wanted.items())


def _missing(arguments: TrainerArguments, interval: int) -> dict[str, str]:
    strategy = arguments.get("save_strategy")
    # A strategy that is known only after construction must not be replaced.
    says = strategy.value if isinstance(strategy, Scalar) else "no" if strategy is None else "steps"
    if says in ("no", None):
        return {"save_strategy": '"steps"', "save_steps": str(interval)}
    return {"save_steps": str(interval)} if says == "steps" and arguments.get("save_steps") is None else {}


RESUME, ALLOW_MISSING, ALLOW_CHANGED = "resume_from_checkpoint", "allow_missing", "allow_changed"

_SAYS = {
    ALLOW_MISSING: "what a checkpoint may lack",
    ALLOW_CHANGED: "what may have changed since a checkpoint",
}


def has_trainer_arguments(graph: Graph) -> bool:
    """Returns whether `main` has trainer arguments, which determine the checkpoint that a run resumes from."""
    return trainer_arguments(graph) is not None


def resumes_from(graph: Graph) -> object:
    """Returns the value of `resume_from_checkpoint`; None if it is not given or is not plain data."""
    arguments = trainer_arguments(graph)
    return arguments.plain(RESUME) if arguments else None


def resume_assignments(
    graph: Graph, resume: str | None, allowed: Mapping[str, Sequence[str] | None]
) -> tuple[tuple[str, str], ...]:
    """Returns the assignments for the options of resuming, as pairs of graph path and YAML text.

    Args:
        graph: the config's graph.
        resume: the value of `--resume`: "auto", "never", or the folder of a checkpoint; None to keep the
            config's setting.
        allowed: two lists by name: the parts that a checkpoint may lack (`ALLOW_MISSING`), and the facts that may have
            changed since the checkpoint was written (`ALLOW_CHANGED`). None instead of a list keeps the config's
            setting.

    Raises:
        ProjectError: FG676 if the config has no trainer arguments, or if `allowed` is given for a run that does not
            resume, neither at its start nor after a failure.
        CheckpointError: FG601 if the folder does not exist.
    """
    wanted: dict[str, str] = {}
    if resume is not None:
        wanted[RESUME] = {"auto": '"auto"', "never": "false"}.get(resume) or _folder(resume, graph)
    wanted |= {name: json.dumps(list(words)) for name, words in allowed.items() if words is not None}
    if not wanted:
        return ()
    arguments = trainer_arguments(graph)
    if arguments is None:
        raise ProjectError(
            "'main' is called without arguments ('args') that could say which checkpoint the run resumes from",
            code="FG676",
            hint="--resume, --allow-missing and --allow-changed are for trainers; give the callable an option of its "
            "own",
            path="main",
        )
    for name, says in _SAYS.items():
        if allowed.get(name) and resume is None and _never_resumes(arguments):
            option = f"--{name.replace('_', '-')}"
            raise ProjectError(
                f"{option} says {says}, but the run does not resume from a checkpoint",
                code="FG676",
                hint=f"add --resume, or leave {option} out to start from the beginning",
                path="main",
            )
    return tuple((arguments.path(name), text) for name, text in wanted.items())


def _never_resumes(arguments: TrainerArguments) -> bool:
    tolerance = fault_tolerance(arguments.graph)
    said = arguments.get(RESUME)
    says_none = said is None or (isinstance(said, Scalar) and said.value in (None, False))
    return says_none and (tolerance is None or not tolerance.auto_resume)


def _folder(text: str, graph: Graph) -> str:
    # An empty text, as an unset shell variable gives it, must not mean the working folder.
    named = os.path.expanduser(text)
    if not os.path.exists(named):
        what = "is a broken link" if os.path.islink(named) else "does not exist"
        arguments = trainer_arguments(graph)
        inside = os.path.join(os.path.expanduser(str(arguments.plain("output_dir"))), text) if arguments else text
        raise CheckpointError(
            f"the checkpoint {text!r} {what}",
            code="FG601",
            hint=f"did you mean {inside!r}?"
            if text and os.path.isdir(inside)
            else "give a folder named checkpoint-<step>, 'auto' for the newest intact one of the output folder, or "
            "'never'; 'fgcli ckpt ls' lists them",
        )
    return json.dumps(os.path.abspath(named))
