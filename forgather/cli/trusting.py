"""The question to the user whether the code of a project may run.

`ask_trust` asks the question on a terminal and stores the answer. It returns when all code that the project needs is
trusted. A process that a launcher has started never asks, because an environment variable contains the decision.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from forgather.cli.output import print_note
from forgather.errors import ProjectError
from forgather.launcher_env import is_worker
from forgather.project.checks.trusted_calls import needs_of
from forgather.project.path_display import near_path
from forgather.project.project import Project
from forgather.project.trust import Trust, add_trust, current_trust, pass_to_processes, trust_file
from forgather.project.untrusted import Needs, trust_hint, untrusted_message


def ask_trust(project: Project, targets: Sequence[str] = ("main",)) -> None:
    """Asks the user whether the code that the targets need may run, unless this code is trusted already.

    Args:
        project: the project, opened with the config to run.
        targets: the names of the targets to be built.

    Raises:
        ProjectError: FG440 if the user does not agree, or if there is no terminal on which the user can be asked.
    """
    needs = needs_of(project, targets)
    if not needs or is_worker(os.environ):
        return
    missing = needs.beyond(current_trust())
    if missing:
        if not (_is_terminal() and _confirmed(missing)):
            raise ProjectError(
                untrusted_message(missing), code="FG440", hint=trust_hint(missing), context=project.lineage
            )
        _keep(missing)
    pass_to_processes(Trust(folders=needs.folders, packages=needs.packages))


def _is_terminal() -> bool:
    # The question goes to the error stream, because the standard output may be a pipe to another program.
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _confirmed(missing: Needs) -> bool:
    print_note(untrusted_message(missing))
    sys.stderr.write("trust it from now on? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _keep(missing: Needs) -> None:
    try:
        add_trust(Trust(folders=missing.folders, packages=missing.packages))
    except ProjectError as error:
        # A home folder that cannot be written must not prevent the run that the user has just allowed.
        print_note(f"trusted for this run alone: {error.message}")
    else:
        print_note(f"noted in {near_path(trust_file())}")
