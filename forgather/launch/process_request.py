"""Process requests: the number of processes that a config and a command line ask for, and the machines to use.

The inputs are a config and the options of `train`. The output is a `ProcessRequest`, and the arguments with which
torchrun starts the requested processes. No process is started and no device is counted. An option takes precedence over
the config. Requests that contradict themselves are errors. `added_settings` lists the settings that `accelerate launch`
adds to a run.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forgather.errors import ProjectError
from forgather.launcher_env import NodeFacts, is_accelerate
from forgather.project.fault_tolerance import fault_tolerance
from forgather.project.literal import string_entries
from forgather.project.locations import library_dir
from forgather.project.project import Project
from forgather.project.targets import MOST_PROCESSES, run_meta
from forgather.project.world_size import processes_per_machine

_WORDS = ("auto", "cpu", "gpu", "xpu")
_DEVICE = re.compile(r"\d{1,4}|(GPU|MIG)-[\w/-]+")


@dataclass(frozen=True, kw_only=True)
class ProcessRequest:
    """The number of processes of a run and the machines on which they run.

    Args:
        per_node: the number of processes on each machine, or a word that torchrun accepts: "auto", "cpu", "gpu" or
            "xpu".
        num_nodes: the number of machines, or a range such as "1:4".
        node_rank: the rank of this machine, counted from 0.
        master: the host and port of the rendezvous, or None to let torchrun choose a free port on one machine.
        handed: the further arguments for torchrun, as the user gave them.
        source: the setting or option that gave `per_node`, for messages.
        is_default: True if only a template of the library sets `per_node`.
        attempts: the maximum number of times that the processes are started again after a failure.
    """

    per_node: int | str = 1
    num_nodes: int | str = 1
    node_rank: int = 0
    master: tuple[str, int | None] | None = None
    handed: tuple[str, ...] = ()
    source: str = "meta.nproc_per_node"
    is_default: bool = False
    attempts: int = 0

    @property
    def is_one(self) -> bool:
        """True if the current process can run the config alone, without torchrun."""
        return self.per_node == 1 and self.num_nodes == 1 and not self.handed and not self.attempts

    @property
    def world_size(self) -> int | None:
        """The total number of processes, or None if this number depends on the devices or machines."""
        if isinstance(self.per_node, int) and isinstance(self.num_nodes, int):
            return self.per_node * self.num_nodes
        return None


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the number of processes, the devices and the machines to a parser."""
    group = parser.add_argument_group("processes (more words for torchrun after '--')")
    group.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=_processes,
        metavar="N",
        help="processes on each machine: a number, gpu or auto (default: nproc_per_node of 'meta')",
    )
    group.add_argument("-d", "--devices", metavar="0,1", help="GPUs to use, one process each unless a number is given")
    group.add_argument("--nnodes", "--nodes", metavar="N", help="machines (default: 1)")
    group.add_argument("--node-rank", "--node_rank", type=int, metavar="N", help="position of this machine, from 0")
    group.add_argument("--master-addr", "--master_addr", metavar="HOST", help="address of machine 0")
    group.add_argument("--master-port", "--master_port", type=int, metavar="PORT", help="port to meet at on machine 0")


def _processes(text: str) -> int | str:
    if text in _WORDS:
        return text
    if number := _whole(text):
        if number > MOST_PROCESSES:
            raise argparse.ArgumentTypeError(
                f"{text} is more than the {MOST_PROCESSES} processes that a machine may have"
            )
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, gpu or auto")


def _whole(text: str) -> int:
    """Returns the value of a text that is a whole number above 0, and 0 for any other text."""
    # int() also reads digits of other scripts, and refuses very long numbers with an error of its own.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def asked_processes(
    project: Project, options: argparse.Namespace, node: NodeFacts | None, handed: Sequence[str] = ()
) -> ProcessRequest:
    """Returns the processes that a config and a command line ask for.

    Args:
        project: the project, opened with the config of the run.
        options: the parsed options of `add_process_options`.
        node: this machine and the number of machines of a job with one task on each machine, or None outside such a
            job.
        handed: the further arguments for torchrun.

    Raises:
        ProjectError: FG828 if the config's number of processes is not a number, FG462 if options contradict each other.
    """
    tolerance = fault_tolerance(project.graph)
    asked = ProcessRequest(
        per_node=processes_per_machine(project.graph),
        handed=tuple(handed),
        is_default=_is_default(project),
        attempts=tolerance.max_retry_attempts if tolerance else 0,
    )
    devices = _devices(options.devices)
    if options.nproc_per_node is not None:
        asked = replace(asked, per_node=options.nproc_per_node, source="--nproc-per-node", is_default=False)
    elif devices and isinstance(asked.per_node, str):
        asked = replace(asked, per_node=len(devices), source="--devices")
    # NCCL refuses two processes on one GPU.
    if devices and isinstance(asked.per_node, int) and asked.per_node > len(devices):
        raise ProjectError(
            f"{asked.source} asks for {asked.per_node} processes, and --devices names {len(devices)}",
            code="FG462",
            hint=f"name {asked.per_node} devices, or give --nproc-per-node {len(devices)}",
        )
    placed = with_machines(asked, options, node)
    given = options.nproc_per_node is not None or run_meta(project.graph).nproc_per_node != "auto"
    # An explicit number counts processes on one machine, while the sizes of a config count all of them.
    return placed if given else _per_machine(placed)


def _per_machine(asked: ProcessRequest) -> ProcessRequest:
    """Returns a request in which the total number of processes is divided by the number of machines.

    A request that cannot be divided evenly is returned unchanged.
    """
    total, machines = asked.per_node, asked.num_nodes
    if isinstance(total, int) and isinstance(machines, int) and total % machines == 0:
        return replace(asked, per_node=total // machines)
    return asked


def _is_default(project: Project) -> bool:
    """Returns True if only a template of the library sets the number of processes."""
    meta = project.graph.targets.get("meta")
    entries = string_entries(meta.value) if meta else ()
    span = next((entry.span for entry in entries if entry.key == "nproc_per_node"), None)
    if span is None:
        return True
    # A template of the library prints the value, but the user may have set the variable that it prints.
    written = project.writers.span(span, "meta.nproc_per_node") or span
    return written.file.startswith(os.path.join(library_dir(), ""))


def _devices(text: str | None) -> list[str]:
    if text is None:
        return []
    devices = [word.strip() for word in text.split(",") if word.strip()]
    if not devices or len(set(devices)) < len(devices):
        raise ProjectError(
            f"--devices is {text!r}: {'a device is named twice' if devices else 'it names no device'}",
            code="FG462",
            hint="name each device once, as in --devices 0,1",
        )
    # `\d` matches digits of all scripts, so the check needs isascii.
    strange = next((device for device in devices if not (_DEVICE.fullmatch(device) and device.isascii())), None)
    if strange is not None:
        raise ProjectError(
            f"--devices is {text[:80]!r}: {strange[:40]!r} is not a device",
            code="FG462",
            hint="name devices by their numbers, as in --devices 0,1, or as nvidia-smi -L does (GPU-..., MIG-...)",
        )
    return devices


def with_machines(asked: ProcessRequest, options: argparse.Namespace, node: NodeFacts | None) -> ProcessRequest:
    """Returns a request with the machines that the options name, or that a job has.

    Args:
        asked: the requested processes.
        options: the parsed options of `add_process_options`.
        node: this machine in a job with one task on each machine, or None outside such a job.

    Raises:
        ProjectError: FG462 if options contradict each other.
    """
    # The command line takes precedence over the scheduler.
    if node is not None and options.nnodes is None:
        return replace(asked, num_nodes=node.num_nodes, node_rank=node.node_rank, master=node.master)
    nodes = options.nnodes or "1"
    parts = nodes.split(":")
    if len(parts) > 2 or not all(map(_whole, parts)):
        raise ProjectError(f"--nnodes is {nodes!r}", code="FG462", hint="give a number of machines, or a range as 1:4")
    num_nodes = int(parts[0]) if len(parts) == 1 else nodes
    rank = options.node_rank or 0
    if isinstance(num_nodes, int) and not 0 <= rank < num_nodes:
        raise ProjectError(
            f"--node-rank is {rank}, and there {'is 1 machine' if num_nodes == 1 else f'are {num_nodes} machines'}",
            code="FG462",
            hint=f"count from 0 to {num_nodes - 1}" if num_nodes > 1 else f"add --nnodes {rank + 1} or more",
        )
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise ProjectError(
            f"--master-port is {options.master_port}, but a port is between 1 and 65535",
            code="FG462",
            hint="leave it out for a free one, or give one above 1024",
        )
    master = (options.master_addr, options.master_port) if options.master_addr else None
    # With --standalone, torchrun would ignore the port.
    if options.master_port is not None and master is None and num_nodes == 1:
        master = ("127.0.0.1", options.master_port)
    return replace(asked, num_nodes=num_nodes, node_rank=rank, master=master)


def refuse_missing_rendezvous(asked: ProcessRequest) -> None:
    """Raises an error if a run on several machines has no address for the rendezvous.

    Raises:
        ProjectError: FG462 if the address is missing.
    """
    hands_meeting = any(word.startswith(("--rdzv", "--master")) for word in asked.handed)
    if asked.num_nodes != 1 and asked.master is None and not hands_meeting:
        raise ProjectError(
            f"a run on {asked.num_nodes} machines has no address to meet at",
            code="FG462",
            hint="give --master-addr the address of machine 0, on every machine",
        )


def torchrun_words(asked: ProcessRequest) -> list[str]:
    """Returns the arguments with which torchrun starts the requested processes, without the program to start."""
    words = [f"--nproc-per-node={asked.per_node}"]
    if asked.attempts:
        words.append(f"--max-restarts={asked.attempts}")
    hands_meeting = any(word.startswith(("--rdzv", "--master", "--standalone")) for word in asked.handed)
    # --standalone chooses a free port, so that two runs on one machine do not meet.
    if asked.num_nodes == 1 and asked.master is None:
        return [*words, *([] if hands_meeting else ["--standalone"]), *asked.handed]
    words += [f"--nnodes={asked.num_nodes}", f"--node-rank={asked.node_rank}"]
    if asked.master is not None:
        host, port = asked.master
        words += [f"--master-addr={host}"] + ([f"--master-port={port}"] if port is not None else [])
    return [*words, *asked.handed]


def use_devices(devices: str | None) -> None:
    """Makes only the named accelerators visible to the current process and to the processes that it starts.

    Raises:
        ProjectError: FG462 if a device is named twice, or if a word is not the name of a device.
    """
    if devices is not None:
        # CUDA reads this variable when it is initialized, so it has to be set before torch uses a device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(devices))


_IDLE = ("", "no", "none", "false", "0", "default", "null")
# accelerate sets whole groups of variables; a group counts only if its first variable enables it.
_GROUPS = {
    "FSDP_": "ACCELERATE_USE_FSDP",
    "ACCELERATE_DEEPSPEED_": "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_DYNAMO_": "ACCELERATE_DYNAMO_BACKEND",
    "MEGATRON_LM_": "ACCELERATE_USE_MEGATRON_LM",
    "PARALLELISM_CONFIG_": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
_ALWAYS_SET = ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
"""The variables that `accelerate launch` sets in every run, so that they are not listed like the others."""


def added_settings(environ: Mapping[str, str]) -> list[str]:
    """Returns the settings that `accelerate launch` added to the environment, each as NAME=VALUE."""
    if not is_accelerate(environ):
        return []
    found = []
    for name in sorted(environ):
        switch = next((switch for group, switch in _GROUPS.items() if name.startswith(group)), None)
        if switch is None and not name.startswith("ACCELERATE_"):
            continue
        is_on = _has_effect(environ.get(switch, "")) if switch else True
        if is_on and _has_effect(environ[name]) and name not in _ALWAYS_SET:
            found.append(f"{name}={environ[name]}")
    # `accelerate launch` always sets it; only a value other than 1 changes anything.
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    return found if steps in ("", "1") else [*found, f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}"]


def _has_effect(value: str) -> bool:
    return value.strip().lower() not in _IDLE
