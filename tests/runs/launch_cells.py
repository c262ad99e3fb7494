"""The cells of the matrix of launch files: a local config on one machine or four, and a program that starts it.

Takes a cell and a program; gives the file, or the error with which it is refused. A project is opened once.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from forgather import Project
from forgather.errors import ForgatherError
from forgather.launch import plan_run
from forgather.launch.launch_files import launch_file
from forgather.launch.launch_job import launch_job
from forgather.launch.process_request import asked_processes

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(file.relative_to(ROOT / "projects") for file in (ROOT / "projects").glob("*/templates/configs/*.yaml"))
QUICK = ("parallel/pipeline_1f1b", "parallel/hybrid", "parallel/fsdp2", "parallel/zero3_offload", "tiny_llama/tiny")
NODES = (1, 4)


@dataclass(frozen=True)
class Cell:
    """A config of a project, and the number of machines."""

    project: str
    config: str
    nodes: int

    @property
    def name(self):
        return f"{self.project}-{self.config}-{self.nodes}"

    @property
    def is_quick(self):
        return f"{self.project}/{self.config}" in QUICK


CELLS = [Cell(config.parts[0], config.stem, nodes) for config in CONFIGS for nodes in NODES]


@functools.cache
def plan_of(project, config):
    return plan_run(Project(config, project_dir=str(ROOT / "projects" / project)))


def request(cell, **options):
    given = {
        "nproc_per_node": None, "devices": None, "nnodes": str(cell.nodes), "node_rank": None, "master_addr": None,
        "master_port": None,
    }  # fmt: skip
    master = {"master_addr": "node-0", "node_rank": 0} if cell.nodes > 1 else {}
    plan = plan_of(cell.project, cell.config)
    return asked_processes(plan.project, SimpleNamespace(**{**given, **master, **options}), None)


def file_of(cell, kind, *, environ=None, words=(), **options):
    """Returns the launch file of a cell; raises the error with which it is refused."""
    plan = plan_of(cell.project, cell.config)
    arguments = ["-p", f"projects/{cell.project}", "-t", cell.config, "train", "--nnodes", str(cell.nodes), *words]
    job = launch_job(
        request(cell, **options),
        arguments,
        plan,
        resume=("--resume", "auto"),
        environ={"HF_TOKEN": "hf_never_written"} if environ is None else environ,
    )
    return launch_file(kind, job)


def printed(cell, kind):
    """Returns the launch file of a cell, or None if it is refused; commands run in the folder of the repository."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        return file_of(cell, kind)
    except ForgatherError as error:
        assert error.code == "FG530", error
        return None
    finally:
        os.chdir(before)
