"""Runs in several processes: starts them with torchrun, or joins this process to those that a launcher started.

Takes a `ProcessRequest`; gives how the processes ended, or this process's place among the others. torchrun's launcher
is reached through its name, because this tower does not import torch. The processes that exist are compared with those
that were asked for before anything is constructed.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from forgather.errors import ForgatherError, ProjectError
from forgather.interrupt import Terminated, end_promptly
from forgather.launch.process_request import ProcessRequest, torchrun_words
from forgather.launcher_env import (
    DEFAULT_PORT,
    STARTED_BY_FGCLI,
    NodeFacts,
    ProcessFacts,
    process_facts,
    tasks_on_this_machine,
)

CHECKED = STARTED_BY_FGCLI
SAFE_PATH = ("PYTHONSAFEPATH", "forgather")


@dataclass(frozen=True)
class Ending:
    """How a run in several processes ended.

    Args:
        status: exit status.
        error: the cause, if none of the processes could report it.
    """

    status: int
    error: ForgatherError | None = None


def start_processes(
    asked: ProcessRequest, arguments: Sequence[str], *, again: Callable[[Any, int, int], bool] | None = None
) -> Ending:
    """Starts the processes, each with the same `fgcli` arguments, and waits until they end.

    Args:
        asked: how many processes, and where.
        arguments: the arguments of `fgcli`.
        again: returns whether failed processes are started again; see `forgather.launch.restart`.

    Raises:
        ProjectError: FG466, devices are asked for, and this machine has none.
        DistributedError: the processes could not be started.
    """
    launcher = import_module("forgather.ml.distributed.launcher")
    if asked.per_node in ("gpu", "xpu") and not launcher.count_devices():
        raise ProjectError(
            f"{asked.source} is {asked.per_node}, and this machine has none that PyTorch can use",
            code="FG466",
            hint="give a number: --nproc-per-node 2 trains with two processes on the CPU",
        )
    with children_environment():
        ended = launcher.launch(torchrun_words(asked), "forgather", arguments, again=again)
    return Ending(launcher.exit_status(ended), launcher.unreported_cause(ended, asked.world_size))


@contextmanager
def children_environment() -> Iterator[None]:
    """Sets what the started processes inherit, and restores the variables of this process afterwards.

    A clone that is not installed becomes importable, and the working folder is not first on `sys.path`, where a file of
    the user could shadow a module.
    """
    name, value = SAFE_PATH
    before = {variable: os.environ.get(variable) for variable in (name, "PYTHONPATH")}
    os.environ.setdefault(name, value)
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.isfile(os.path.join(home, "pyproject.toml")):
        known = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([home, *known]))
    try:
        yield
    finally:
        for variable, former in before.items():
            if former is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = former


@contextmanager
def join_run() -> Iterator[Any]:
    """Joins this process to the others of its run for the block. If the block fails, the failure ends all processes.

    Raises:
        ProjectError: FG468, see `refuse_two_launchers`.
        DistributedError: the other processes cannot be reached.
        SecondaryFailure: the block failed because another process did, which reports the cause.
    """
    refuse_two_launchers(os.environ)
    _export_launcher_variables(process_facts(os.environ))
    member = import_module("forgather.ml.distributed.peer").join()
    member.watch()
    try:
        yield member
    except GeneratorExit:  # a generator that is closed early, because a signal ends the process
        raise
    except BaseException as error:
        if member.report_failure(error):
            raise
        # A status above 128 is a signal: another process was interrupted, and so is the run.
        if member.is_main and member.status > 128:
            raise Terminated from error
        raise SecondaryFailure(member.status) from error
    member.leave()
    _left_runs.append(member)


_left_runs: list[Any] = []


def skip_teardown_after_leaving(status: int) -> None:
    """Makes this process skip the interpreter's teardown, if it has left the other processes of its run.

    Args:
        status: the exit status.
    """
    if _left_runs:
        atexit.register(end_promptly, status)


def run_joined(run: Callable[[Any], int]) -> int:
    """Returns the exit status of `run(member)` in this process, which a launcher has started together with others."""
    try:
        with join_run() as member:
            status = run(member)
            member.report_status(status)
            return status
    except SecondaryFailure as follows:
        return follows.status


def _export_launcher_variables(facts: ProcessFacts) -> None:
    """Sets the variables that torch and other libraries read, if the launcher uses other names for them."""
    variables: dict[str, object] = {
        "RANK": facts.rank,
        "LOCAL_RANK": facts.local_rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_WORLD_SIZE": facts.local_world_size,
    }
    if facts.master is not None:
        variables |= {"MASTER_ADDR": facts.master[0], "MASTER_PORT": facts.master[1]}
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


class SecondaryFailure(Exception):  # its cause is the error, and another process reports that
    """This process failed because another one did, which reports the cause.

    Args:
        status: the exit status of this process.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def refuse_lone_process(asked: ProcessRequest, config: str) -> None:
    """Raises if `accelerate launch` started this process alone although several were asked for.

    Args:
        asked: the processes that were asked for.
        config: the config's name.

    Raises:
        ProjectError: FG461.
    """
    wished = asked.per_node
    if isinstance(wished, str):
        devices = import_module("forgather.ml.distributed.launcher").count_devices()
        wished = devices or (os.cpu_count() or 1 if wished in ("auto", "cpu") else 1)
    lone = ProcessFacts(launcher="accelerate launch, which starts one process where there is no GPU,")
    refuse_other_process_count(replace(asked, per_node=wished), lone, config)


def refuse_two_launchers(environ: Mapping[str, str]) -> None:
    """Raises if SLURM started several tasks on this machine, and each of them started torchrun.

    Raises:
        ProjectError: FG468.
    """
    tasks = tasks_on_this_machine(environ)
    if "TORCHELASTIC_RUN_ID" in environ and tasks > 1:
        here = process_facts(environ).local_world_size
        raise ProjectError(
            f"SLURM started {tasks} tasks on this machine, and each of them {here} processes: {tasks * here} in all",
            code="FG468",
            hint="one task on each machine starts the others: #SBATCH --ntasks-per-node=1",
        )


def launched_nodes(facts: ProcessFacts) -> NodeFacts:
    """Returns the machines that a launcher distributed the processes over."""
    machines = max(facts.world_size // max(facts.local_world_size, 1), 1)
    master = facts.master or ("localhost", DEFAULT_PORT)
    return NodeFacts(machines, facts.rank // max(facts.local_world_size, 1), master, facts.launcher)


def refuse_other_process_count(asked: ProcessRequest, facts: ProcessFacts, config: str) -> None:
    """Raises if a launcher started another number of processes than was asked for.

    Args:
        asked: the processes that were asked for.
        facts: the processes that exist.
        config: the config's name.

    Raises:
        ProjectError: FG461.
    """
    wished, got = asked.per_node, facts.local_world_size
    is_met = isinstance(wished, str) or wished == got or asked.world_size == facts.world_size
    # A number that only a template of the library gives is a default, which several processes may replace. One process
    # in place of several is still refused.
    if is_met or (asked.is_default and got > 1):
        return
    many = f"{got} process{'es' if got > 1 else ''}"
    script = shlex.quote(sys.argv[0]) if sys.argv[0].endswith(".py") else f"scripts/train_script.py {config}"
    raise ProjectError(
        f"{facts.launcher} started {many} on this machine, and {asked.source} asks for {wished}",
        code="FG461",
        hint=f"torchrun --nproc-per-node {wished} {script} ..., or keep {got}: add --nproc-per-node {got} at the end",
        expected=wished,
        found=got,
    )
