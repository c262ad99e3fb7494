"""`fgcli plan`: what a run needs on each device, before it runs. Builds the run without weights."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set
from forgather.cli.output import print_findings, write_json, write_text
from forgather.cli.plan_output import fit_lines, plan_lines
from forgather.cli.trusting import ask_trust
from forgather.launch.in_process import MAIN, plan_run
from forgather.launch.planning import device_of, fit_on, plan_of
from forgather.project.world_size import processes_per_machine

CONFIG_OPTIONS = True
EXECUTES = True
DESCRIPTION = """Plan the memory of a run on each device. The run is built with tensors that have shapes and no values,
and its own strategy computes a step and an evaluation: no GPU, no weights and no other process are needed. A row
is 'traced' if the code of the run allocated it, 'formula' if it follows from settings, and 'assumed' otherwise. With
--hardware, or with a GPU here, the plan says whether each process fits, and what would make it smaller if not."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml plan
  fgcli -t fsdp2.yaml plan --hardware h200 --gpus 8 --nodes 4
  fgcli -t tiny.yaml plan --set trainer_args.per_device_train_batch_size=64
  fgcli -t tiny.yaml plan --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="devices of each machine (default: the processes of the config)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="device of each process: a name of docs/reference/hardware.md, or a file (default: the GPUs here)",
    )
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: plans the run, prints the plan, and returns the exit status."""
    options = invocation.options
    named = None if options.hardware is None else device_of(options.hardware, gpus=1)
    project = invocation.open_project()
    plan_run(project)
    print_findings(project.diagnostics, project.meta.project_dir)
    ask_trust(project, [MAIN])
    asked = processes_per_machine(project.graph)
    gpus = options.gpus if options.gpus is not None else asked if isinstance(asked, int) else 1
    # What constructors print must not be mixed with the result.
    with redirect_stdout(sys.stderr):
        found = plan_of(project, gpus=gpus, nodes=options.nodes)
        device = named or device_of(None, gpus=gpus)
    fit = None if device is None else fit_on(found, device)
    if options.json:
        write_json({"config": project.config_name, **found, "fit": fit}, options.output)
    else:
        write_text("\n".join([*plan_lines(found), *fit_lines(fit, found["world_size"])]), options.output)
    return 0
