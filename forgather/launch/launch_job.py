"""A job: what a launch file starts, on which machines, and what these machines need.

Takes the config, the requested processes and the command line of `fgcli`; gives a `LaunchJob`, from which
`forgather/launch/launch_files.py` writes the file. Nothing is started. A job that a launch file cannot describe is
refused with the reason: processes that do not fit the config, or options that only have a meaning on this machine.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forgather.config.graph import Env
from forgather.config.traverse import walk_places
from forgather.errors import ProjectError
from forgather.launch.in_process import RunPlan
from forgather.launch.layout_check import refuse_other_layout
from forgather.launch.process_request import ProcessRequest
from forgather.launcher_env import DEFAULT_PORT
from forgather.project.checks.trusted_calls import needs_of
from forgather.project.project import Project
from forgather.project.trust import VARIABLE, current_trust

CPUS = 4
"""CPU cores for one process: its own, and three data loader workers."""
_OF_LAUNCHING = (
    "--print", "--nnodes", "--nodes", "--node-rank", "--node_rank", "--master-addr", "--master_addr", "--master-port",
    "--master_port", "-d", "--devices",
)  # fmt: skip
_ESCAPES = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_LIBRARIES = ("HF_TOKEN", "WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_TOKEN")


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A run that a launch file starts.

    Args:
        name: the name of the job.
        folder: the absolute working folder of the command.
        words: the arguments of `fgcli`, without those that are for the launcher.
        asked: the processes of the run.
        devices: the value of `--devices`, or None if the option is not given.
        resume: the words with which a job that starts again resumes from its checkpoint. They are empty if the config
            has no such option.
        folders: the absolute folders that all machines must see at the same place: the working folder, the project and
            the folder of the runs.
        variables: the names of the environment variables that the run reads. Their values are not part of a job.
        trust: the value of `FORGATHER_TRUST`, which lets the job run the code that is trusted here.
    """

    name: str
    folder: str
    words: tuple[str, ...]
    asked: ProcessRequest
    devices: str | None = None
    resume: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    trust: str = ""

    @property
    def preparation(self) -> list[str]:
        """The lines of a script for bash before the command."""
        trust = [f"export {VARIABLE}={shell_text([self.trust])}"] if self.trust else []
        return ["set -euo pipefail", f"cd {shell_text([self.folder])}", *trust]

    @property
    def command(self) -> list[str]:
        """The command that starts the processes of one machine, with the words for torchrun at its end."""
        return [*self._start, *self.handed]

    @property
    def handed(self) -> list[str]:
        """The words for torchrun at the end of `fgcli train`; empty if there are none."""
        return ["--", *self.asked.handed] if self.asked.handed else []

    @property
    def _start(self) -> list[str]:
        return ["python", "-m", "forgather", *self.words]

    def command_on(self, nodes: str, rank: str, master: str) -> str:
        """Returns the command as shell text, with the place of the machine that runs it.

        Args:
            nodes: shell text of the number of machines.
            rank: shell text of the rank of the machine, counted from 0.
            master: shell text of the address of machine 0.
        """
        if self.asked.num_nodes == 1:
            return shell_text(self.command)
        port = (self.asked.master or ("", None))[1] or DEFAULT_PORT
        place = f"--nnodes {nodes} --node-rank {rank} --master-addr {master} --master-port {port}"
        return " ".join([shell_text(self._start), place, shell_text(self.handed)]).rstrip()


def launch_job(
    asked: ProcessRequest,
    arguments: Sequence[str],
    plan: RunPlan,
    *,
    devices: str | None = None,
    resume: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> LaunchJob:
    """Returns the job of a command line.

    Args:
        asked: the processes of the run.
        arguments: the arguments of `fgcli`.
        plan: the run.
        devices: the value of `--devices`, or None if the option is not given.
        resume: the words with which a job that starts again resumes from its checkpoint.
        environ: the environment variables of this process, of which only names are read.

    Raises:
        ProjectError: FG530 if the config cannot run in the requested processes, or reads a variable that a shell
            cannot set.
    """
    project, folder = plan.project, os.getcwd()
    if asked.world_size is not None:
        refuse_other_layout(project, asked.world_size)
    return LaunchJob(
        name=job_name(project.config_name),
        folder=folder,
        words=tuple(without_launching(arguments)),
        asked=asked,
        devices=devices,
        resume=tuple(resume),
        folders=outermost([folder, project.meta.project_dir, plan.output_dir]),
        variables=_variables(project, environ),
        trust=_trust(project),
    )


def without_launching(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without the options for machines, devices, printed files and torchrun.

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


def shell_text(words: Sequence[str]) -> str:
    r"""Returns words as one line of text for bash.

    Example:
        >>> print(shell_text(["--set", "a=b c", "--set", "d=e\nf"]))
        --set 'a=b c' --set $'d=e\nf'
    """
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    # A line break would end a comment, and a block of YAML.
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(c if c.isprintable() and c not in "'\\" else _ESCAPES.get(c) or _as_bytes(c) for c in word)
    return f"$'{escaped}'"


def _as_bytes(char: str) -> str:
    # bash writes a byte in every locale; a code point it writes only in those that have it. Python reads a byte that is
    # not UTF-8 as half of a surrogate pair.
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def job_name(config: str) -> str:
    """Returns the name of a job for a config, in the letters that every launcher accepts.

    Example:
        >>> job_name("experiments/ddp.yaml"), job_name("Llama 3_8B.v2.yaml"), job_name("7b.yaml")
        ('ddp', 'llama-3-8b-v2', 'run-7b')
    """
    stem = os.path.splitext(os.path.basename(config))[0].lower()
    # The strictest are Kubernetes and dstack: a letter first, two letters at least, and 40 at most.
    name = re.sub(r"[^a-z0-9]+", "-", stem)[:36].strip("-")
    return name if re.match("[a-z].", name) else f"run-{name}".strip("-")


def outermost(folders: Sequence[str]) -> tuple[str, ...]:
    """Returns absolute folders without those that are inside another one.

    Example:
        >>> outermost(["/projects/a", "/projects/a/runs", "/data"])
        ('/projects/a', '/data')
    """
    whole = list(dict.fromkeys(os.path.abspath(folder) for folder in folders))
    return tuple(f for f in whole if not any(f != g and os.path.commonpath([f, g]) == g for g in whole))


def _variables(project: Project, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of variables that the config reads, and of those that libraries read and that are set here.

    Raises:
        ProjectError: FG530 if a name is not one that a shell takes: it would be a line of the file, or a part of one.
    """
    read = {node.variable for _, node in walk_places(project.graph) if isinstance(node, Env)}
    read |= {name for name in {**project.meta.env_reads, **project.rendered.env_reads} if name in environ}
    strange = next((name for name in sorted(read) if not _NAME.fullmatch(name)), None)
    if strange is not None:
        hint = "use a name of letters, digits and underscores"
        raise _refusal(f"the config reads the environment variable {strange!r}, which no shell can set", hint)
    return tuple(sorted(read | {name for name in _OF_LIBRARIES if name in environ}))


def _trust(project: Project) -> str:
    """Returns what the config needs to be trusted for, as the variable has it; "" if the user does not trust it."""
    needs = needs_of(project, ("main",))
    return "" if needs.beyond(current_trust()) else os.pathsep.join([*needs.folders, *needs.packages])


def refuse_word_as_number(job: LaunchJob, tool: str) -> int:
    """Returns the number of processes on each machine; raises an error if only the machine can say it.

    Raises:
        ProjectError: FG530 if the number of processes or of machines is not a number, or if devices are named.
    """
    asked = job.asked
    if isinstance(asked.num_nodes, str):
        raise _refusal(f"{tool} takes a number of machines, and --nnodes is {asked.num_nodes}", "give one number")
    if isinstance(asked.per_node, str):
        raise _refusal(
            f"{asked.source} is {asked.per_node}, and {tool} must be told how many GPUs a machine has",
            "give the number, as in --nproc-per-node 8",
        )
    if job.devices is not None:
        raise _refusal(
            f"--devices {job.devices} names GPUs of one machine, and {tool} assigns them",
            "give their number: --nproc-per-node",
        )
    return asked.per_node


def _refusal(message: str, hint: str) -> ProjectError:
    return ProjectError(message, code="FG530", hint=hint)
