"""The environment variables of launchers: rank, world size and rendezvous of this process.

Reads the variables of torchrun, `accelerate launch`, SLURM, Open MPI and Kubeflow. Gives `ProcessFacts` for a process
that a launcher started, `NodeFacts` for a machine whose processes are still to be started, and the name of the launcher
for messages. No process is started. If several launchers have set variables, those of the innermost launcher are used.

While a config is built, the context variables `requested` and `compared_by_launcher` say how many processes the config
asks for, and whether the launcher compares that number with the processes that it started.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise

from forgather.errors import DistributedError

DEFAULT_PORT = 29500
"""torchrun's default port for the rendezvous."""
# The names that each launcher uses for torchrun's variables.
_SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
}
_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The position of one process in the run.

    Args:
        rank: the position of the process among all processes.
        local_rank: the position of the process among the processes of the machine.
        world_size: the number of all processes.
        local_world_size: the number of processes on the machine.
        master: the host and the port of the rendezvous; None if no launcher gave them.
        attempt: the number of restarts of the job so far, under torchrun; None under other launchers.
        agent_hosts_store: whether torchrun's agent runs the rendezvous store.
        launcher: the name of the launcher in messages; "" if no launcher started the process.
        attempts_left: the number of restarts that torchrun would still make.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master: tuple[str, int] | None = None
    attempt: int | None = None
    agent_hosts_store: bool = False
    launcher: str = field(default="", compare=False)
    attempts_left: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine of a job with one task on each machine.

    Args:
        num_nodes: the number of machines of the job.
        node_rank: the position of the machine among all machines of the job, from 0.
        master: the host and the port of the rendezvous.
        source: the name of the scheduler that gave these facts, for messages.
    """

    num_nodes: int
    node_rank: int
    master: tuple[str, int]
    source: str


def process_facts(environ: Mapping[str, str]) -> ProcessFacts:
    """Returns the position of this process in the run.

    Args:
        environ: the environment variables of this process.

    Raises:
        DistributedError: FG701 if a variable is not a number, or if the numbers contradict each other.
    """
    launcher, values = _launcher_and_position(environ)
    if not launcher:
        return ProcessFacts()
    world_size = _number(values, "WORLD_SIZE", 1)
    # Kubeflow sets no LOCAL_WORLD_SIZE: each pod counts as a machine with one process.
    here = 1 if launcher == "Kubeflow" else world_size
    attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0) if "TORCHELASTIC_RUN_ID" in environ else None
    facts = ProcessFacts(
        rank=_number(values, "RANK", 0),
        local_rank=_number(values, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number(values, "LOCAL_WORLD_SIZE", here),
        master=_master(values),
        attempt=attempt,
        attempts_left=0 if attempt is None else max(0, _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0) - attempt),
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher=launcher,
    )
    if not 0 <= facts.rank < facts.world_size:
        raise DistributedError(
            f"RANK is {facts.rank} and WORLD_SIZE is {facts.world_size}",
            code="FG701",
            hint="RANK counts from 0 to WORLD_SIZE - 1; a launcher such as torchrun sets both",
        )
    # SLURM gives one list of the tasks on each machine, and the first entry need not be that of this machine.
    if "LOCAL_WORLD_SIZE" in values and launcher != "SLURM" and not facts.local_rank < facts.local_world_size:
        raise DistributedError(
            f"LOCAL_RANK is {facts.local_rank} and LOCAL_WORLD_SIZE is {facts.local_world_size}",
            code="FG701",
            hint="LOCAL_RANK counts from 0 to LOCAL_WORLD_SIZE - 1; a launcher such as torchrun sets both",
        )
    return facts


def node_facts(environ: Mapping[str, str]) -> NodeFacts | None:
    """Returns this machine's position in a job with one task on each machine, or None outside such a job.

    Args:
        environ: the environment variables of this process.

    Raises:
        DistributedError: FG701 if a variable is not a number, or if this pod's number is not below the number of pods.
    """
    # A launcher on this machine has already started the processes.
    if "LOCAL_RANK" in environ:
        return None
    if _is_slurm_step(environ):
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
        if nodes > 1 and _number(environ, "SLURM_STEP_NUM_TASKS", 1) == nodes:
            master = _master(_slurm_values(environ))
            return NodeFacts(nodes, _number(environ, "SLURM_NODEID", 0), master or ("localhost", DEFAULT_PORT), "SLURM")
        return None
    if _is_pod(environ):
        # Kubeflow's PyTorchJob sets PET_* for torchrun, and older operators set WORLD_SIZE and RANK to count pods.
        nodes = _number(environ, "PET_NNODES", _number(environ, "WORLD_SIZE", 1))
        rank = _number(environ, "PET_NODE_RANK", _number(environ, "RANK", 0))
        host = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR") or "localhost"
        port = _port(environ, "PET_MASTER_PORT", _port(environ, "MASTER_PORT", DEFAULT_PORT))
        if not rank < nodes:
            raise DistributedError(
                f"this pod is number {rank} of {nodes}, counted from 0",
                code="FG701",
                hint="PET_NODE_RANK (or RANK) counts from 0 to PET_NNODES (or WORLD_SIZE) - 1; the operator sets both",
            )
        return NodeFacts(nodes, rank, (host, port), "Kubeflow")
    return None


def is_accelerate(environ: Mapping[str, str]) -> bool:
    """Returns whether `accelerate launch` started this process, even if it started no other process."""
    # `accelerate launch` sets this variable for every process, also for a single one.
    return "ACCELERATE_MIXED_PRECISION" in environ


def tasks_on_this_machine(environ: Mapping[str, str]) -> int:
    """Returns the number of tasks of the current SLURM step on this machine; 1 if there is no SLURM step."""
    return _number(_slurm_values(environ), "LOCAL_WORLD_SIZE", 1) if _is_slurm_step(environ) else 1


def is_worker(environ: Mapping[str, str]) -> bool:
    """Returns whether a launcher started this process as one of the processes of a run."""
    return bool(_launcher_and_position(environ)[0]) and node_facts(environ) is None


def is_started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Returns whether torchrun, which `fgcli` and `accelerate launch` use, started this process."""
    return "TORCHELASTIC_RUN_ID" in environ


def _launcher_and_position(environ: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """Returns the name of the launcher, and the variables of this process's position under torchrun's names."""
    # torchrun may run inside a SLURM step, so the innermost launcher is asked first.
    if is_started_by_torchrun(environ):
        return "accelerate launch" if is_accelerate(environ) else "torchrun", environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return ("Kubeflow" if _is_pod(environ) else "a launcher"), environ
    if "OMPI_COMM_WORLD_RANK" in environ:
        return "mpirun", {**environ, **_renamed(environ, _OPEN_MPI)}
    if _is_slurm_step(environ) and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return "SLURM", _slurm_values(environ)
    return "", environ


def _renamed(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {ours: environ[theirs] for ours, theirs in names.items() if theirs in environ}


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    # A batch script and the shell of salloc have SLURM_PROCID too; only a step that srun started has a number of tasks.
    return "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ


def _is_pod(environ: Mapping[str, str]) -> bool:
    # Kubernetes sets this variable in every pod, and Kubeflow adds WORLD_SIZE.
    in_cluster = "KUBERNETES_SERVICE_HOST" in environ and "WORLD_SIZE" in environ
    return (in_cluster or "PET_NNODES" in environ) and "LOCAL_RANK" not in environ


def _slurm_values(environ: Mapping[str, str]) -> dict[str, str]:
    values = _renamed(environ, _SLURM)
    # "4(x2),1": four tasks on two machines, one on the third. The first entry is right where all machines are alike.
    values["LOCAL_WORLD_SIZE"] = re.split(r"[(,]", values.get("LOCAL_WORLD_SIZE", "1"))[0]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    job = environ.get("SLURM_JOB_ID", "0")
    # Two jobs may share a machine, so the port is derived from the job's number.
    port = 20000 + int(job) % 20000 if _is_number(job) else DEFAULT_PORT
    values["MASTER_ADDR"] = environ.get("MASTER_ADDR") or first_host(nodes)
    values["MASTER_PORT"] = environ.get("MASTER_PORT") or str(port)
    return values


def first_host(nodes: str) -> str:
    """Returns the first machine of a SLURM node list.

    Example:
        >>> first_host("gpu[007-010,12],login"), first_host("a1,a2")
        ('gpu007', 'a1')
    """
    found = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _master(values: Mapping[str, str]) -> tuple[str, int] | None:
    host = values.get("MASTER_ADDR")
    return (host, _port(values, "MASTER_PORT", DEFAULT_PORT)) if host else None


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not _is_number(text):
        raise DistributedError(
            f"the environment variable {name} is {text[:80]!r}, which is not a whole number",
            code="FG701",
            hint=f"unset {name}, or start the processes with torchrun, which sets it",
        )
    return int(text)


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    number = _number(environ, name, default)
    if not 0 < number < 65536:
        raise DistributedError(
            f"the environment variable {name} is {number}, but a port is between 1 and 65535",
            code="FG701",
            hint=f"unset {name}, or start the processes with torchrun, which sets it",
        )
    return number


def _is_number(text: str) -> bool:
    # `isdigit` accepts superscripts, which int() refuses; more than 18 digits are a typing error.
    return text.isascii() and text.isdigit() and len(text) < 19


STARTED_BY_FGCLI = "FORGATHER_CHECKED"
"""The variable that `fgcli` sets for the processes that it starts."""
ENDS_WITH_PARENT = "FORGATHER_ENDS_WITH_PARENT"
"""The variable of a process that ends with the one that started it, see `forgather.launch.bound_process`."""
LAUNCHER_PROCESS = "FORGATHER_LAUNCHER_PROCESS"
"""The variable with the number of the `fgcli` process that starts the processes of a run, which end with it."""
_NUM_PROCESSES_OPTION = r"--num[-_]processes(?:=(\d+))?"
_NUM_PROCESSES_SETTING = r"(?m)^num_processes:\s*(\d+)"


@dataclass(frozen=True, slots=True)
class RequestedProcesses:
    """The number of processes that a config asks for.

    Args:
        processes: the number of processes on this machine, or "gpu" or "auto".
        config: the name of the config.
        project_dir: the folder of the project.
    """

    processes: int | str
    config: str
    project_dir: str


requested: ContextVar[RequestedProcesses | None] = ContextVar("requested", default=None)
"""The request of the config that is being built, if no launcher has started processes for it."""
compared_by_launcher: ContextVar[bool] = ContextVar("compared_by_launcher", default=False)
"""True if a launcher of Forgather compares the number of processes with the config; the trainer then need not do so."""


def started_by(environ: Mapping[str, str], program: str | None = None, *, parent: Sequence[str] | None = None) -> str:
    """Returns the program that started this process, for messages.

    If `accelerate launch` was asked for several processes and started one, the text says so.

    Args:
        environ: the environment variables of this process.
        program: the path of the running program; `sys.argv[0]` by default.
        parent: the command line of the parent process; by default it is read from the system.

    Example:
        >>> started_by({}, "/usr/bin/fgcli"), started_by({}, "/home/me/train.py")
        ('fgcli', 'python train.py')
    """
    launcher = process_facts(environ).launcher
    if launcher:
        return "fgcli" if STARTED_BY_FGCLI in environ and launcher == "torchrun" else launcher
    if is_accelerate(environ):
        # On a machine without a GPU, accelerate starts one process even if --num_processes asks for more.
        asked = processes_of_accelerate(environ, _parent() if parent is None else parent)
        if asked is None or asked == 1:
            return "accelerate launch"
        return f"accelerate launch, which was configured for {asked} and starts one where there is no GPU"
    return _program(sys.argv[0] if program is None else program)


def _program(program: str) -> str:
    folder, name = os.path.split(program)
    if name in ("fgcli", "fgcli.exe") or (name == "__main__.py" and os.path.basename(folder) == "forgather"):
        return "fgcli"
    # In a notebook, sys.argv[0] is a script of the kernel.
    if "ipykernel" in sys.modules:
        return "a notebook"
    return f"python {name}" if name.endswith(".py") else "python"


def processes_of_accelerate(environ: Mapping[str, str], parent: Sequence[str]) -> int | None:
    """Returns the number of processes that `accelerate launch` should start, or None if it cannot be determined.

    Args:
        environ: the environment variables, which determine the folder of accelerate's config file.
        parent: the command line of the launcher.

    Example:
        >>> processes_of_accelerate({"HF_HOME": "/nowhere"}, ["python", "accelerate", "launch", "--num_processes", "2"])
        2
    """
    if not any("accelerate" in word for word in parent):
        return None
    for word, after in pairwise([*parent, ""]):
        found = re.fullmatch(_NUM_PROCESSES_OPTION, word)
        number = (found[1] or after) if found else ""
        if number.isdigit():
            return int(number)
    named = next((after for word, after in pairwise(parent) if word in ("--config_file", "--config-file")), None)
    # accelerate reads its default config file unless another one is named.
    file = named or accelerate_config(environ)
    try:
        with open(file or os.devnull, encoding="utf-8") as stream:
            found = re.search(_NUM_PROCESSES_SETTING, stream.read())
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None


def accelerate_config(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the file that `accelerate config` writes on this machine; None if the file does not exist.

    Source:
        `accelerate.commands.config.config_args.default_yaml_config_file`.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    file = os.path.join(os.path.expanduser(home), "accelerate", "default_config.yaml")
    return file if os.path.isfile(file) else None


def _parent() -> list[str]:
    """Returns the command line of the parent process; an empty list on systems without /proc."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as stream:
            return os.fsdecode(stream.read()).split("\0")
    except OSError:
        return []
