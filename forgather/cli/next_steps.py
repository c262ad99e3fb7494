"""The command line that resumes a training run after an interruption or a failure.

The inputs are a config, the command that was typed, and the error that ended the run; the output is a command line. No
command is given if the resumed run would fail in the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from forgather.errors import ForgatherError
from forgather.project.dynamic_args import read_options
from forgather.project.fault_tolerance import fault_tolerance, has_trainer_arguments, resumes_from
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments

RESUME_OPTION = "--resume-from-checkpoint"
# A bad step: a spike of the gradients, or a loss or gradient that is not finite.
_FULL_DISK, _BAD_STEP = ("FG609",), ("FG650", "FG818")


def resume_words(project: Project) -> tuple[str, ...]:
    """Returns the words of the option that makes a run resume.

    The result is empty if the config has neither arguments of a trainer nor an option for this.
    """
    if has_trainer_arguments(project.graph):
        return ("--resume", "auto")
    declared = any(RESUME_OPTION in option.names for option in read_options(project.graph).options)
    return (RESUME_OPTION, "auto") if declared else ()


def resume_command(project: Project, command: Sequence[str], *also: str) -> str | None:
    """Returns the command that resumes from the newest checkpoint, or None if the config has no option for this.

    Args:
        project: the project, opened with the config of the run.
        command: the words of the command that was typed.
        also: further words that are added to the command.
    """
    words = resume_words(project)
    if not words:
        return None
    end = command.index("--") if "--" in command else len(command)
    own, handed = command[:end], command[end:]
    for name in ("--resume", RESUME_OPTION):
        own = _without_option(own, name)
    return shlex.join([*own, *words, *also, *handed])


def _without_option(command: Sequence[str], name: str) -> list[str]:
    kept: list[str] = []
    may_be_value = False
    for word in command:
        # `--resume` may have no value, so the word after it is dropped only if it is not an option.
        is_option = word == name or word.startswith(f"{name}=")
        if not is_option and (not may_be_value or word.startswith("-")):
            kept.append(word)
        may_be_value = word == name
    return kept


def newest_checkpoint(output_dir: str) -> Path | None:
    """Returns the newest checkpoint in an output folder, or None if the folder has no checkpoint.

    If several runs have written to the folder, this is the last checkpoint of the latest run.
    """
    found = import_module("forgather.ml.checkpoint.lineage").checkpoints_in_order(Path(output_dir))
    return found[-1][0] if found else None


def checkpoint_to_resume(project: Project, output_dir: str) -> str | None:
    """Returns the checkpoint from which the config resumes, or None if the run starts from the beginning.

    Args:
        project: the project, opened with the config of the run.
        output_dir: the output folder, whose newest checkpoint is returned for `resume_from_checkpoint: auto`.
    """
    said = resumes_from(project.graph)
    if said is True or said == "auto":
        newest = newest_checkpoint(output_dir)
        return None if newest is None else str(newest)
    return said if isinstance(said, str) else None


def add_resume_command(error: ForgatherError, project: Project, command: Sequence[str], output_dir: str) -> None:
    """Appends the command that resumes the run to the hint of an error.

    This is done after an error about a full disk or a bad optimizer step, because these runs can be resumed.

    Args:
        error: the error that ended the run, whose hint is changed.
        project: the project, opened with the config of the run.
        command: the words of the command that was typed.
        output_dir: the output folder. If the folder has no checkpoint, the hint is not changed.
    """
    if error.code not in (*_FULL_DISK, *_BAD_STEP) or newest_checkpoint(output_dir) is None:
        return
    also: tuple[str, ...] = ()
    if error.code in _BAD_STEP:
        if (arguments := trainer_arguments(project.graph)) is None:
            return
        # With its old settings, the run would fail at the same step again.
        also = ("--set", f"{arguments.path('bad_step_policy')}=skip")
    if (going_on := resume_command(project, command, *also)) is not None:
        error.hint = "; ".join(filter(None, (error.hint, f"to resume:  {going_on}")))


def requeued_job_resumes(project: Project) -> bool:
    """Returns True if a requeued SLURM job would resume the run from its checkpoint."""
    tolerance = fault_tolerance(project.graph)
    return has_trainer_arguments(project.graph) and (tolerance is None or tolerance.auto_resume)
