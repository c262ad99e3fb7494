"""Checks of what one config needs on this machine: packages, devices, and processes.

The input is a project with the config, and the requested processes; nothing of the config is constructed.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.doctor.result import CheckResult, not_checked, ok, wrong
from forgather.errors import ProjectError
from forgather.launch.layout_check import refuse_other_layout
from forgather.launch.process_request import ProcessRequest
from forgather.project.check import check_project
from forgather.project.project import Project


def check_config(project: Project, asked: ProcessRequest, devices: int) -> Iterator[CheckResult]:
    """Checks the packages that a config needs, and whether its processes have devices and fit its sizes.

    Args:
        project: the project, opened with the config.
        asked: the requested processes.
        devices: the number of GPUs that PyTorch can use on this machine.
    """
    yield from _packages(project)
    if asked.world_size is None:
        yield not_checked("processes", f"{asked.source} is {asked.per_node}: as many as the machine has devices")
        return
    try:
        refuse_other_layout(project, asked.world_size)
    except ProjectError as error:
        yield wrong("processes", error.message, error.hint or "change --nnodes or --nproc-per-node")
    else:
        where = "this machine" if asked.num_nodes == 1 else f"each of {asked.num_nodes} machines"
        yield ok("processes", f"{asked.per_node} on {where} fit the config")
    each = asked.per_node
    if isinstance(each, int) and 0 < devices < each:
        fix = f"give --nproc-per-node {devices}, or change the sizes of the config"
        yield wrong(
            "devices of the config", f"{asked.source} asks for {each} processes, and there are {devices} GPUs", fix
        )


def _packages(project: Project) -> Iterator[CheckResult]:
    errors = [found for found in check_project(project, for_run=True).findings if found.severity == "error"]
    for found in errors:
        yield wrong("config", f"[{found.code}] {found.message}", found.hint or "fgcli check shows the place")
    if not errors:
        yield ok("config", "no error; all packages that it needs are installed")
