"""Scripts that start a run on another machine: a SLURM batch job, torchrun, or `accelerate launch`.

The inputs are a `ProcessRequest` and the command line of `fgcli`; the output is the text of a script. One task on each
machine starts the processes of that machine. The script contains every setting of the launcher, so that no setting
comes from a configuration file on the machine that runs the script.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence

from forgather.launch.process_request import ProcessRequest, torchrun_words

_CPUS = 4  # CPU cores for one process: its own, and three data loader workers
_TERMINATED = 128 + signal.SIGTERM
KINDS = ("slurm", "torchrun", "accelerate")
"""The launchers for which a script can be written."""
_OF_LAUNCHING = (
    "--print", "--nnodes", "--node-rank", "--node_rank", "--master-addr", "--master_addr", "--master-port",
    "--master_port", "-d", "--devices",
)  # fmt: skip


def batch_script(
    kind: str,
    asked: ProcessRequest,
    arguments: Sequence[str],
    *,
    name: str,
    folder: str,
    devices: str | None = None,
    resume: Sequence[str] = (),
) -> str:
    """Returns the text of a script that starts a run.

    Args:
        kind: the launcher, which is one of `KINDS`.
        asked: the processes of the run.
        arguments: the arguments of `fgcli`.
        name: the name of the job.
        folder: the working folder of the command.
        devices: the value of `--devices`, or None if the option is not given.
        resume: the arguments that make a requeued SLURM job resume from its checkpoint. They are empty if the config
            has no such option.
    """
    words = without_launching(arguments)
    if kind == "slurm":
        lines = _slurm(asked, words, name, resume)
    else:
        lines = {"torchrun": _torchrun, "accelerate": _accelerate}[kind](asked, words, name)
    prepared = ["set -euo pipefail", f"cd {shlex.quote(folder)}"]
    if devices is not None:
        prepared.append(f"export CUDA_VISIBLE_DEVICES={shlex.quote(devices)}")
    # sbatch reads #SBATCH lines only up to the first command.
    head = [line for line in lines if line.startswith("#")]
    return "\n".join(["#!/usr/bin/env bash", *head, *prepared, *(line for line in lines if line not in head)]) + "\n"


def without_launching(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without the options for machines, devices, printed scripts and torchrun.

    Example:
        >>> without_launching(["-t", "ddp", "train", "--print", "slurm", "--nnodes=2", "--set", "a=1", "--", "--tee=3"])
        ['-t', 'ddp', 'train', '--set', 'a=1']
    """
    at = next((n for n, word in enumerate(arguments) if word == "train"), -1) + 1
    kept, rest = list(arguments[:at]), list(arguments[at:])
    rest = rest[: rest.index("--")] if "--" in rest else rest
    is_value = False
    for word in rest:
        if not is_value and word.partition("=")[0] not in _OF_LAUNCHING:
            kept.append(word)
        is_value = word in _OF_LAUNCHING and not is_value
    return kept


def _slurm(asked: ProcessRequest, words: Sequence[str], name: str, resume: Sequence[str]) -> list[str]:
    each = asked.per_node
    machine = ["#SBATCH --exclusive"]
    if isinstance(each, int):
        machine = [f"#SBATCH --gpus-per-node={each}", f"#SBATCH --cpus-per-task={each * _CPUS}"]
    nodes = asked.num_nodes if isinstance(asked.num_nodes, int) else str(asked.num_nodes).replace(":", "-")
    handed = ["--", *asked.handed] if asked.handed else []
    return [
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        "# One task on each machine: it starts the processes there, and finds the other machines by SLURM's variables.",
        "#SBATCH --ntasks-per-node=1",
        *machine,
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "# Five minutes before the end a step is finished and saved, and the job is queued again.",
        "#SBATCH --signal=TERM@300",
        "#SBATCH --requeue",
        "status=0",
        " ".join(
            [
                # Since SLURM 22.05, srun does not inherit --cpus-per-task from its job.
                'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"',
                shlex.join(["python", "-m", "forgather", *words]),
                # SLURM sets SLURM_RESTART_COUNT only in a job that was requeued.
                *([f"${{SLURM_RESTART_COUNT:+{shlex.join(resume)}}}"] if resume else []),
                *([shlex.join(handed)] if handed else []),
                "|| status=$?",
            ]
        ),
        f'if [ "$status" = {_TERMINATED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"',
    ]


def _torchrun(asked: ProcessRequest, words: Sequence[str], name: str) -> list[str]:
    launching = torchrun_words(asked)
    # The same script runs on every machine, so each one gives its own rank in NODE_RANK.
    command = [shlex.join(["torchrun", *(word for word in launching if not word.startswith("--node-rank"))])]
    if asked.num_nodes != 1:
        command.append('--node-rank="${NODE_RANK:?the position of this machine, from 0}"')
    return [f"# {name}", " ".join([*command, shlex.join(["-m", "forgather", *words])])]


def _accelerate(asked: ProcessRequest, words: Sequence[str], name: str) -> list[str]:
    each = str(asked.per_node) if isinstance(asked.per_node, int) else "$(nvidia-smi --list-gpus | wc -l)"
    machines = asked.num_nodes if isinstance(asked.num_nodes, int) else 1
    total = each if machines == 1 else f"$(( {each} * {machines} ))"
    options = [f'--num_processes "{total}"', f"--num_machines {machines}"]
    if asked.per_node != 1 or machines != 1:
        options.append("--multi_gpu")
    if machines != 1:
        host, port = asked.master or ("localhost", None)
        options += ['--machine_rank "${NODE_RANK:?the position of this machine, from 0}"']
        options += [f"--main_process_ip {shlex.quote(host)}", f"--main_process_port {port or 29500}"]
    # Written out, because a file that `accelerate config` made on that machine would otherwise set them.
    options += ["--mixed_precision no", "--dynamo_backend no"]
    return [
        f"# {name}",
        "# Without GPUs accelerate starts one process: use torchrun there.",
        " ".join(["accelerate launch", *options, shlex.join(["-m", "forgather", *words])]),
    ]


def job_name(config: str) -> str:
    """Returns the name of a batch job for a config: the file name without its suffix.

    Example:
        >>> job_name("experiments/ddp.yaml")
        'ddp'
    """
    return os.path.splitext(os.path.basename(config))[0]
