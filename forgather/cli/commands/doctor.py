"""`fgcli doctor`: checks this machine, and several machines together, before a run is started on them."""

from __future__ import annotations

import argparse
import os

from forgather.cli.doctor_output import LOOK, as_data, conclusion, line_of
from forgather.cli.invocation import Invocation
from forgather.cli.options import a_time, add_json, add_set
from forgather.cli.output import write_json, write_text
from forgather.doctor.meeting import Place
from forgather.doctor.result import State
from forgather.doctor.survey import GROUPS, Wanted, survey
from forgather.errors import ProjectError, nearest
from forgather.launch import plan_run
from forgather.launch.process_request import (
    ProcessRequest,
    add_process_options,
    asked_processes,
    refuse_missing_rendezvous,
    use_devices,
    with_machines,
)
from forgather.launcher_env import DEFAULT_PORT, node_facts

TAKES_CONFIG = True
DESCRIPTION = """Check this machine: devices and their driver, environment variables that no library reads, network,
memory, disk, folders, versions, and a sum over two processes. With --nnodes, the machines meet and are compared: start
it on each, with its --node-rank; in a job of SLURM or Kubeflow each knows its own. With -t, check what the config
needs, too. The exit status is 1 if something is wrong. A check that cannot run says why, and is no fault."""
EXAMPLES = """examples:
  fgcli doctor
  fgcli -t fsdp2.yaml doctor
  fgcli doctor --nodes 2 --node-rank 0 --master-addr gpu0           on machine 0; on machine 1 with --node-rank 1
  srun --ntasks-per-node=1 fgcli doctor                             on all machines of a SLURM job
  fgcli doctor --only variables,network --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("--folder", metavar="DIR", help="folder of runs (default: that of the config, or this folder)")
    parser.add_argument(
        "--timeout", type=a_time, default=60, metavar="SECONDS", help="maximum wait for other machines (default: 60)"
    )
    parser.add_argument(
        "--only", type=_groups, metavar="GROUP,...", help=f"the checks that run (default: all): {', '.join(GROUPS)}"
    )
    add_set(parser)
    add_json(parser)
    add_process_options(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: runs the checks, prints their results, and returns 1 if one found a fault, otherwise 0."""
    options = invocation.options
    use_devices(options.devices)
    wanted = _wanted(invocation)
    results = []
    for result in survey(wanted):
        results.append(result)
        if not options.json:
            write_text(line_of(result), look=LOOK)
    if options.json:
        write_json(as_data(results))
    else:
        write_text(conclusion(results))
    return int(any(result.state is State.WRONG for result in results))


def _wanted(invocation: Invocation) -> Wanted:
    options, node = invocation.options, node_facts(os.environ)
    has_config = invocation.config is not None or invocation.project_dir is not None
    project = invocation.open_project() if has_config else None
    asked = asked_processes(project, options, node) if project else with_machines(ProcessRequest(), options, node)
    refuse_missing_rendezvous(asked)
    folder = options.folder or (plan_run(project).output_dir if project else os.getcwd())
    return Wanted(
        folder=folder,
        place=_place(asked, options.timeout),
        port=asked.master[1] if asked.master else None,
        timeout=options.timeout,
        project=project,
        asked=asked if project else None,
        groups=options.only,
    )


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is no group of checks: {nearest(name, list(GROUPS))}")
    return names


def _place(asked: ProcessRequest, timeout: float) -> Place | None:
    if asked.num_nodes == 1:
        return None
    if isinstance(asked.num_nodes, str):
        raise ProjectError(
            f"the doctor compares a number of machines, and --nnodes is {asked.num_nodes}",
            code="FG462",
            hint="give one number",
        )
    host, port = asked.master or ("localhost", None)
    return Place(nodes=asked.num_nodes, rank=asked.node_rank, master=(host, port or DEFAULT_PORT), timeout=timeout)
