"""The values `auto` of a config, replaced by numbers when a command begins; see `forgather.launch.auto_values`.

Takes a project and the command line; changes the project, and gives the values that were found.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from sys import stderr
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.next_steps import checkpoint_to_resume
from forgather.cli.output import print_note
from forgather.launch.auto_values import AutoValue, auto_settings, find_values, room_of, values_of_checkpoint
from forgather.project.project import Project


def auto_values_of_all(
    project: Project, invocation: Invocation, *, output_dir: str, member: Any = None
) -> list[AutoValue]:
    """Replaces each `auto` in every process of a run by the number that rank 0 finds; returns the numbers on rank 0.

    Args:
        project: the project, opened with the config.
        invocation: the command line.
        output_dir: the output folder of the run.
        member: the current process as a `Peer` of several processes, or None if there is only one process.
    """
    if not auto_settings(project):
        return []
    if member is not None and not member.is_main:
        project.add_overrides([(path, text) for path, text in member.share("auto")["values"]])
        return []
    world, local = (member.facts.world_size, member.facts.local_world_size) if member is not None else (1, 1)
    values = with_auto_values(project, invocation, gpus=local, nodes=world // local, output_dir=output_dir)
    if member is not None:
        member.share("auto", {"values": [(value.path, value.text) for value in values]})
    for value in values:
        print_note(value.line())
    return values


def with_auto_values(
    project: Project, invocation: Invocation, *, gpus: int, nodes: int, output_dir: str | None = None
) -> list[AutoValue]:
    """Replaces each `auto` of a project's trainer arguments by a number, and returns the numbers.

    Args:
        project: the project, opened with the config.
        invocation: the command line, which may have `--hardware` and `--memory`.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        output_dir: the output folder of a run, which keeps the numbers of the run that it resumes. None if nothing is
            resumed.
    """
    if not auto_settings(project):
        return []
    checkpoint = None if output_dir is None else checkpoint_to_resume(project, output_dir)
    values = [] if checkpoint is None else values_of_checkpoint(project, checkpoint)
    project.add_overrides([(value.path, value.text) for value in values])
    if auto_settings(project):
        options = invocation.options
        # What constructors print must not be mixed with the result of the command.
        with redirect_stdout(stderr):
            room = room_of(project, gpus=gpus, nodes=nodes, hardware=options.hardware, memory=options.memory)
            found = find_values(project, room)
        project.add_overrides([(value.path, value.text) for value in found])
        values += found
    return values
