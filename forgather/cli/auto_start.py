"""The values `auto` of a config, replaced by numbers when a command begins; see `forgather.launch.auto_values`.

Takes a project and the command line; changes the project, and gives the values that were found.
"""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import redirect_stdout
from sys import stderr
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.next_steps import checkpoint_to_resume
from forgather.cli.output import print_note
from forgather.errors import ProjectError
from forgather.launch.auto_values import ROWS, AutoValue, auto_settings, find_values, values_of_checkpoint
from forgather.launch.batch_trial import asks_for_trial, confirmed_rows
from forgather.launch.room import room_of
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments


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
    asks = asks_for_trial(project)
    if not asks and not auto_settings(project):
        return []
    if member is not None and not member.is_main:
        shared = member.share("auto")
        project.add_overrides([(path, text) for path, text in shared["values"]])
        if shared["tries"]:
            _tried_values(project, member)
        elif asks:
            _without_trial(project)
        return []
    world, local = (member.facts.world_size, member.facts.local_world_size) if member is not None else (1, 1)
    values = with_auto_values(project, invocation, gpus=local, nodes=world // local, output_dir=output_dir)
    tries = asks and not any(value.name == ROWS and value.is_kept for value in values)
    if member is not None:
        member.share("auto", {"values": [(value.path, value.text) for value in values], "tries": tries})
    for value in values:
        print_note(value.line())
    if asks and not tries:
        _without_trial(project)
    return [*values, *_tried_values(project, member)] if tries else values


def _without_trial(project: Project) -> None:
    """Turns the trial off: the number of rows is that of the checkpoint."""
    arguments = trainer_arguments(project.graph)
    assert arguments is not None  # noqa: S101 - they ask for the trial
    project.add_overrides([(arguments.path("auto_find_batch_size"), "false")])


def _tried_values(project: Project, member: Any) -> list[AutoValue]:
    """Tries the batch on all devices and replaces it by one that fits; returns the new numbers."""
    tried = confirmed_rows(project, member)
    arguments = trainer_arguments(project.graph)
    assert arguments is not None  # noqa: S101 - they ask for the trial
    texts = {name: json.dumps(value) for name, value in tried.changes.items()}
    values = [AutoValue(name, arguments.path(name), text, "tried on all devices") for name, text in texts.items()]
    project.add_overrides([(value.path, value.text) for value in values])
    if member is None or member.is_main:
        print_note(tried.line())
    return values


def refuse_unused_memory(project: Project, options: Namespace) -> None:
    """Raises an error if `--memory` would have no effect.

    Args:
        project: the project, opened with the config.
        options: the options of the command.

    Raises:
        ProjectError: FG948 if the memory is given and no value of the config is `auto`.
    """
    if options.memory is not None and not auto_settings(project) and not asks_for_trial(project):
        raise ProjectError(
            f"--memory is for values 'auto', and config {project.config_name!r} has none",
            code="FG948",
            hint="--free SIZE says whether the run fits into this memory; 'fgcli plan --memory SIZE' finds a batch",
        )


def room_words(options: Namespace) -> dict[str, Any]:
    """Returns what a command line says about the devices, as arguments of `room_of`."""
    # Only `fgcli plan` has the last one.
    return {name: vars(options).get(name) for name in ("hardware", "memory", "free", "device_type")}


def with_auto_values(
    project: Project, invocation: Invocation, *, gpus: int, nodes: int, output_dir: str | None = None
) -> list[AutoValue]:
    """Replaces each `auto` of a project's trainer arguments by a number, and returns the numbers.

    Args:
        project: the project, opened with the config.
        invocation: the command line, which may have `--hardware`, `--memory` and `--free`, and that of a plan
            `--device-type`.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        output_dir: the output folder of a run, which keeps the numbers of the run that it resumes. None if nothing is
            resumed.
    """
    if not auto_settings(project) and not asks_for_trial(project):
        return []
    checkpoint = None if output_dir is None else checkpoint_to_resume(project, output_dir)
    values = [] if checkpoint is None else values_of_checkpoint(project, checkpoint)
    project.add_overrides([(value.path, value.text) for value in values])
    if auto_settings(project):
        options = invocation.options
        # What constructors print must not be mixed with the result of the command.
        with redirect_stdout(stderr):
            found = find_values(project, room_of(project, gpus=gpus, nodes=nodes, **room_words(options)), print_note)
        project.add_overrides([(value.path, value.text) for value in found])
        values += found
    return values
