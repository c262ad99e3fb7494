"""Printed scripts for torchrun and `accelerate launch`, read by the parsers of these programs; and the layouts.

A file is printed or refused as the run itself would be: a dry run builds the config for the same number of processes.
"""

import json
import os
import shlex
import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import config_from_args, get_args_parser

from tests.matrix import thinned
from tests.runs.launch_cells import CELLS, NODES, ROOT, Cell, printed, request

PARALLEL = [cell for cell in CELLS if cell.project == "parallel"]
# How many blocks the model has is not read from the config: these have more stages than blocks.
MORE_STAGES_THAN_BLOCKS = ("pipeline_interleaved", "pipeline_zero_bubble")


def started(text, program, folder, **environ):
    """Runs a script with a stand-in of a program; returns the arguments of the program."""
    note = f"import json, sys; open({str(folder / 'words')!r}, 'w').write(json.dumps(sys.argv[1:]))"
    (folder / program).write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(note)} "$@"\n')
    (folder / program).chmod(0o755)
    found = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environ}
    subprocess.run(["bash", "-c", text], env=found, check=True, capture_output=True)
    return json.loads((folder / "words").read_text())


@pytest.mark.parametrize("cell", thinned(CELLS, lambda cell: cell.config in ("fsdp2", "tiny")), ids=lambda c: c.name)
def test_torchrun_and_accelerate_read_what_was_asked_for(cell, tmp_path):
    text = printed(cell, "torchrun")
    if text is None:
        return
    asked = request(cell)
    args = get_args_parser().parse_args(started(text, "torchrun", tmp_path, NODE_RANK="1"))
    config, _, words = config_from_args(args)
    assert (cell.nodes, cell.nodes, asked.per_node) == (config.min_nodes, config.max_nodes, config.nproc_per_node)
    assert args.module and "forgather" == args.training_script
    if cell.nodes > 1:
        assert ("1", "node-0") == (str(args.node_rank), args.master_addr)
    words = started(printed(cell, "accelerate"), "accelerate", tmp_path, NODE_RANK="1")
    read = launch_command_parser().parse_args(words[1:])
    assert (asked.world_size, cell.nodes) == (read.num_processes, read.num_machines)
    assert (True, "forgather") == (read.module, read.training_script)
    if cell.nodes > 1:
        assert (1, "node-0", 29500, True) == (
            read.machine_rank,
            read.main_process_ip,
            read.main_process_port,
            read.multi_gpu,
        )


def test_without_a_rendezvous_torchrun_has_no_machines_that_join_later():
    """Which is why such a file is refused: torchrun would take the range, and wait for the largest number."""
    args = get_args_parser().parse_args(["--nnodes=1:4", "--master-addr=h", "--master-port=1234", "x.py"])
    config, _, _ = config_from_args(args)
    assert ("static", 1, 4) == (config.rdzv_backend, config.min_nodes, config.max_nodes)


def dry_run(cell, processes):
    words = [
        "-p",
        f"projects/{cell.project}",
        "-t",
        cell.config,
        "train",
        "--nproc-per-node",
        str(processes),
        "--dry-run",
    ]
    words += ["--world-size", str(processes)]
    run = [sys.executable, "-m", "forgather", *words]
    return subprocess.run(
        run, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )


@pytest.mark.matrix
@pytest.mark.parametrize("cell", PARALLEL, ids=lambda cell: cell.name)
def test_a_file_is_printed_if_the_run_can_be_built_in_so_many_processes(cell):
    built = dry_run(cell, request(cell).world_size)
    is_printed = printed(cell, "slurm") is not None
    if cell.nodes == 4 and cell.config in MORE_STAGES_THAN_BLOCKS:
        assert is_printed and "request at most 8 stages" in built.stderr, built.stderr
        return
    assert is_printed == (built.returncode == 0), built.stderr


def test_the_matrix_has_all_local_configs():
    assert len(NODES) * 60 < len(CELLS)
    assert Cell("parallel", "zero2", 4) in CELLS
