"""What `train --resume`, `--allow-missing` and `--allow-changed` change in a config: the arguments of its trainer.

Takes a graph and what was asked for; gives assignments as `--set` takes them. Keeps true: what a run goes on from is
a value of its graph like any other, so it is checked, kept in the run's folder and repeated as all of them are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from forgather.config.graph import Graph, Scalar
from forgather.errors import CheckpointError, ProjectError
from forgather.project.tolerance import fault_tolerance
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments

RESUME, ALLOW_MISSING, ALLOW_CHANGED = "resume_from_checkpoint", "allow_missing", "allow_changed"

_SAYS = {
    ALLOW_MISSING: "what a checkpoint may lack",
    ALLOW_CHANGED: "what may have changed since a checkpoint",
}


def takes_resume(graph: Graph) -> bool:
    """Tells whether `main` is called with arguments that say what a run goes on from."""
    return trainer_arguments(graph) is not None


def resumes_from(graph: Graph) -> object:
    """Returns what the arguments of `main` say that the run goes on from; None where they say nothing."""
    arguments = trainer_arguments(graph)
    return arguments.plain(RESUME) if arguments else None


def resume_assignments(
    graph: Graph, resume: str | None, allowed: Mapping[str, Sequence[str] | None]
) -> tuple[tuple[str, str], ...]:
    """Returns pairs of path and YAML text.

    Args:
        graph: of the config.
        resume: "auto", "never", or a folder; None leaves what the config says.
        allowed: parts of a checkpoint that a run may do without (`ALLOW_MISSING`), and what may have changed since it
            (`ALLOW_CHANGED`); None leaves what the config says.

    Raises:
        ProjectError: FG676, the config has no such arguments, or the run goes on from no checkpoint that could lack
            a part, neither now nor after a failure.
        CheckpointError: FG601, the folder does not exist.
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
            "'main' is called without arguments ('args') that could say what the run goes on from",
            code="FG676",
            hint="--resume, --allow-missing and --allow-changed are for trainers; give the callable an option of its "
            "own",
            path="main",
        )
    for name, says in _SAYS.items():
        if allowed.get(name) and resume is None and _begins_anew(arguments):
            option = f"--{name.replace('_', '-')}"
            raise ProjectError(
                f"{option} says {says}, and the run goes on from none",
                code="FG676",
                hint=f"add --resume, or leave {option} out to begin anew",
                path="main",
            )
    return tuple((arguments.path(name), text) for name, text in wanted.items())


def _begins_anew(arguments: TrainerArguments) -> bool:
    tolerance = fault_tolerance(arguments.graph)
    said = arguments.get(RESUME)
    says_none = said is None or (isinstance(said, Scalar) and said.value in (None, False))
    return says_none and (tolerance is None or not tolerance.auto_resume)


def _folder(text: str, graph: Graph) -> str:
    # An empty text, as of a variable of a shell that is not set, is not the working folder.
    named = os.path.expanduser(text)
    if not os.path.exists(named):
        what = "is a link to nothing" if os.path.islink(named) else "does not exist"
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
