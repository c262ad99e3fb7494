"""Launch files: the texts that start a run by another program than `fgcli`, one for each program.

Takes the name of a program and a `LaunchJob`; gives the text. A text that would contain a secret is refused: launch
files are shared, and secrets come from the environment of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forgather.errors import ProjectError
from forgather.launch.batch_scripts import accelerate, slurm, torchrun
from forgather.launch.cluster_files import dstack, kubeflow, skypilot
from forgather.launch.launch_job import LaunchJob
from forgather.launch.ray_driver import ray_program
from forgather.redaction import hide

_WRITERS: Mapping[str, Callable[[LaunchJob], str]] = MappingProxyType(
    {
        "slurm": slurm,
        "torchrun": torchrun,
        "accelerate": accelerate,
        "kubeflow": kubeflow,
        "skypilot": skypilot,
        "dstack": dstack,
        "ray": ray_program,
    }
)
KINDS = tuple(_WRITERS)
"""The programs for which a launch file can be written."""
FIND_EACH_OTHER = ("slurm", "kubeflow", "skypilot", "dstack", "ray")
"""The programs under which machines find each other, so that no address is needed."""


def launch_file(kind: str, job: LaunchJob) -> str:
    """Returns the text of a launch file.

    Args:
        kind: the program, which is one of `KINDS`.
        job: the run to start.

    Raises:
        ProjectError: FG530 if the program cannot start these processes, FG531 if the text would contain a secret.
    """
    text = _WRITERS[kind](job)
    refuse_secret(text, "a launch file would show it")
    return text


def refuse_secret(text: str, why: str) -> None:
    """Raises an error if a command that is written into a file contains a secret.

    Args:
        text: the command, or the content of the file.
        why: what the file would do, such as "a launch file would show it".

    Raises:
        ProjectError: FG531 if there is a secret.
    """
    if hide(text) != text:
        raise ProjectError(
            f"the command contains a secret, and {why}",
            code="FG531",
            hint="let the config read it: `!env NAME` in place of the value; the file then has the name alone",
        )
