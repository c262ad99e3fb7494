"""Shell scripts that start a run on other machines: a SLURM batch job, torchrun, or `accelerate launch`.

The input is a `LaunchJob`; the output is the text of a script. One task on each machine starts the processes of that
machine. The script contains every setting of the launcher, so that no setting comes from a configuration file on the
machine that runs the script.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from forgather.errors import ProjectError
from forgather.launch.launch_job import CPUS, LaunchJob, shell_text
from forgather.launch.process_request import torchrun_words
from forgather.launcher_env import DEFAULT_PORT

_TERMINATED = 128 + signal.SIGTERM
_RANK = '"${NODE_RANK:?the position of this machine, from 0}"'


def slurm(job: LaunchJob) -> str:
    """Returns a batch script for `sbatch`."""
    asked = job.asked
    machine = ["#SBATCH --exclusive"]
    if isinstance(asked.per_node, int):
        machine = [f"#SBATCH --gpus-per-node={asked.per_node}", f"#SBATCH --cpus-per-task={asked.per_node * CPUS}"]
    head = [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={str(asked.num_nodes).replace(':', '-')}",
        "# One task on each machine: it starts the processes there, and finds the other machines by SLURM's variables.",
        "#SBATCH --ntasks-per-node=1",
        *machine,
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "# Five minutes before the end a step is finished and saved, and the job is queued again.",
        "#SBATCH --signal=TERM@300",
        "#SBATCH --requeue",
        *_shared(job),
        *_variables(job, "sbatch passes your environment on"),
    ]
    step = [
        # Since SLURM 22.05, srun does not inherit --cpus-per-task from its job.
        'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"',
        shell_text(["python", "-m", "forgather", *job.words]),
        # SLURM sets SLURM_RESTART_COUNT only in a job that was requeued.
        *([f"${{SLURM_RESTART_COUNT:+{shell_text(job.resume)}}}"] if job.resume else []),
        *([shell_text(job.handed)] if job.handed else []),
        "|| status=$?",
    ]
    body = [
        "status=0",
        " ".join(step),
        f'if [ "$status" = {_TERMINATED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"',
    ]
    return _script(job, head, body)


def torchrun(job: LaunchJob) -> str:
    """Returns a script that starts the processes of one machine by `torchrun`.

    Raises:
        ProjectError: FG530 if the number of machines may change, and no words for torchrun say how they meet.
    """
    asked = job.asked
    if isinstance(asked.num_nodes, str) and not any(word.startswith("--rdzv") for word in asked.handed):
        raise ProjectError(
            f"torchrun starts {asked.num_nodes} machines only with a rendezvous that lets them join later",
            code="FG530",
            hint="give its words at the end: -- --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id NAME",
        )
    launching = [word for word in torchrun_words(asked) if not word.startswith("--node-rank")]
    # The same script runs on every machine. Machines that may join later have no rank before they meet.
    rank = [f"--node-rank={_RANK}"] if isinstance(asked.num_nodes, int) and asked.num_nodes > 1 else []
    command = ["torchrun", shell_text(launching), *rank, shell_text(["-m", "forgather", *job.words])]
    head = [f"# {job.name}", *_shared(job), *_variables(job, "set it on each machine")]
    return _script(job, head, [" ".join(command)])


def accelerate(job: LaunchJob) -> str:
    """Returns a script that starts the processes of one machine by `accelerate launch`.

    Raises:
        ProjectError: FG530 if the number of machines may change, if words for torchrun are given, or if the processes
            are neither a number nor one for each GPU.
    """
    asked = job.asked
    why = None
    if asked.handed:
        why = f"accelerate launch does not take the words for torchrun ({shell_text(asked.handed)[:60]})"
    elif isinstance(asked.num_nodes, str):
        why = f"accelerate launch takes a number of machines, and --nnodes is {asked.num_nodes}"
    elif asked.per_node in ("cpu", "xpu"):
        why = f"accelerate launch starts one process for each NVIDIA GPU, and {asked.source} is {asked.per_node}"
    if why is not None:
        raise ProjectError(why, code="FG530", hint="use --print torchrun")
    return _script(job, _accelerate_head(job), [_accelerate_command(job)])


def _accelerate_head(job: LaunchJob) -> list[str]:
    return [
        f"# {job.name}",
        "# Without GPUs accelerate starts one process: use torchrun there.",
        *_shared(job),
        *_variables(job, "set it on each machine"),
    ]


def _accelerate_command(job: LaunchJob) -> str:
    asked, machines = job.asked, job.asked.num_nodes
    each = str(asked.per_node) if isinstance(asked.per_node, int) else "$(nvidia-smi --list-gpus | wc -l)"
    total = each if machines == 1 else f"$(( {each} * {machines} ))"
    options = [f'--num_processes "{total}"', f"--num_machines {machines}"]
    if asked.per_node != 1 or machines != 1:
        options.append("--multi_gpu")
    if machines != 1:
        host, port = asked.master or ("localhost", None)
        options += [f"--machine_rank {_RANK}"]
        options += [f"--main_process_ip {shell_text([host])}", f"--main_process_port {port or DEFAULT_PORT}"]
    if asked.attempts:
        options.append(f"--max_restarts {asked.attempts}")
    # Written out, because a file that `accelerate config` made on that machine would otherwise set them.
    options += ["--mixed_precision no", "--dynamo_backend no"]
    return " ".join(["accelerate launch", *options, shell_text(["-m", "forgather", *job.words])])


def _shared(job: LaunchJob) -> Iterator[str]:
    if job.asked.num_nodes != 1:
        yield f"# All machines must see these folders at the same place: {shell_text(job.folders)}"


def _variables(job: LaunchJob, where: str) -> Iterator[str]:
    if job.variables:
        yield f"# The run reads from its environment: {', '.join(job.variables)} ({where})."


def _script(job: LaunchJob, head: Sequence[str], body: Sequence[str]) -> str:
    """Returns a script. sbatch reads #SBATCH lines only up to the first command, so all comments come first."""
    prepared = job.preparation
    if job.devices is not None:
        prepared.append(f"export CUDA_VISIBLE_DEVICES={shell_text([job.devices])}")
    return "\n".join(["#!/usr/bin/env bash", *head, *prepared, *body]) + "\n"
