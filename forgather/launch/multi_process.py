"""Runs with several processes: starts the processes with torchrun, or joins processes that a launcher has started.

The input is a `ProcessRequest`. The output is the exit status and the cause of a failure, or the current process as a
peer of the run. The modules that use torch are imported by name when they are needed, because this package must not
import torch. Before any object is constructed, the number of existing processes is compared with the requested number.
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
from pathlib import Path
from typing import Any

from forgather.errors import ForgatherError, ProjectError
from forgather.interrupt import Terminated, end_promptly
from forgather.launch.process_request import ProcessRequest, torchrun_words
from forgather.launcher_env import (
    DEFAULT_PORT,
    LAUNCHER_PROCESS,
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
    """The result of a run with several processes.

    Args:
        status: the exit status.
        error: the error that is still to be reported, or None if a process has reported it or nothing failed.
    """

    status: int
    error: ForgatherError | None = None


def start_processes(
    asked: ProcessRequest, arguments: Sequence[str], *, again: Callable[[Any, int, int], bool] | None = None
) -> Ending:
    """Starts the processes of a run on this machine, each with the same `fgcli` arguments, and waits until they end.

    Args:
        asked: the number of processes and the machines.
        arguments: the arguments of `fgcli`.
        again: a function that decides whether failed processes are started again, such as a
            `forgather.launch.restart.RestartPolicy`. By default, they are started again until no attempt is left.

    Raises:
        ProjectError: FG466 if one process per device is requested and this machine has no device.
        DistributedError: FG463 or FG464 if the processes cannot be started.
    """
    launcher = import_module("forgather.ml.distributed.launcher")
    if asked.per_node in ("gpu", "xpu") and not launcher.count_devices():
        raise ProjectError(
            f"{asked.source} is {asked.per_node}, and this machine has none that PyTorch can use",
            code="FG466",
            hint="give a number: --nproc-per-node 2 trains with two processes on the CPU",
        )
    os.environ[LAUNCHER_PROCESS] = str(os.getpid())
    try:
        with children_environment():
            ended = launcher.launch(torchrun_words(asked), "forgather", arguments, again=again)
    finally:
        del os.environ[LAUNCHER_PROCESS]
    return Ending(launcher.exit_status(ended), launcher.unreported_cause(ended, asked.world_size))


@contextmanager
def children_environment() -> Iterator[None]:
    """Context manager that sets PYTHONPATH and PYTHONSAFEPATH for started processes, and restores them afterwards.

    PYTHONPATH lets the processes import Forgather from a source checkout that is not installed. PYTHONSAFEPATH keeps
    the working folder out of `sys.path`, where a file of the user could shadow a module.
    """
    # A value of our own, by which `python -m forgather` recognizes the variable and removes it again.
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
    """Context manager that joins the current process to the run and yields a `Peer`.

    An exception in the body is reported to the other processes and ends them.

    Raises:
        ProjectError: FG468 if two launchers have started processes, see `refuse_two_launchers`.
        DistributedError: FG701 or FG706 if the other processes cannot be reached.
        Terminated: if the body failed on the main process because another process was interrupted by a signal.
        SecondaryFailure: if the body failed because another process failed, which reports the cause.
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


# Set by `join_run` and read at the end of the command, when the context manager has returned.
_left_runs: list[Any] = []


def skip_teardown_after_leaving(status: int) -> None:
    """Makes the current process exit without the interpreter's teardown, if it was a peer of a run that has ended.

    Args:
        status: the exit status of the process.
    """
    if _left_runs:
        atexit.register(end_promptly, status)


def run_joined(run: Callable[[Any], int]) -> int:
    """Joins the current process to the run, calls `run` with the `Peer`, and returns the exit status.

    The current process must be one of several processes that a launcher has started.
    """
    try:
        with join_run() as member:
            status = run(member)
            member.report_status(status)
            return status
    except SecondaryFailure as follows:
        return follows.status


def _export_launcher_variables(facts: ProcessFacts) -> None:
    """Sets RANK, WORLD_SIZE and the other variables that torch reads, unless the launcher has set them."""
    variables: dict[str, object] = {
        "RANK": facts.rank,
        "LOCAL_RANK": facts.local_rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_WORLD_SIZE": facts.local_world_size,
    }
    if facts.master is not None:
        variables |= {"MASTER_ADDR": facts.master[0], "MASTER_PORT": facts.master[1]}
    # What the launcher has set is kept: torchrun's store, for example, listens on the port that torchrun chose.
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


class SecondaryFailure(Exception):
    """An exception that ends this process after another process has failed and has reported the cause.

    Args:
        status: the exit status of this process.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def refuse_lone_process(asked: ProcessRequest, config: str) -> None:
    """Raises an error if `accelerate launch` started only one process although several were requested.

    Args:
        asked: the processes that the config and the command line ask for.
        config: the name of the config, for the message.

    Raises:
        ProjectError: FG461 if more than one process was requested.
    """
    wished = asked.per_node
    if isinstance(wished, str):
        devices = import_module("forgather.ml.distributed.launcher").count_devices()
        wished = devices or (os.cpu_count() or 1 if wished in ("auto", "cpu") else 1)
    lone = ProcessFacts(launcher="accelerate launch, which starts one process where there is no GPU,")
    refuse_other_process_count(replace(asked, per_node=wished), lone, config)


def refuse_two_launchers(environ: Mapping[str, str]) -> None:
    """Raises an error if SLURM started several tasks on this machine, and each task started torchrun.

    Raises:
        ProjectError: FG468 if several tasks of this machine started torchrun.
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
    """Returns the number of machines of a run, the rank of this machine, and the address of the rendezvous."""
    machines = max(facts.world_size // max(facts.local_world_size, 1), 1)
    master = facts.master or ("localhost", DEFAULT_PORT)
    return NodeFacts(machines, facts.rank // max(facts.local_world_size, 1), master, facts.launcher)


def refuse_other_process_count(asked: ProcessRequest, facts: ProcessFacts, config: str) -> None:
    """Raises an error if a launcher started another number of processes than was requested.

    Several processes are accepted in place of a number that is only a default of the template library.

    Args:
        asked: the processes that the config and the command line ask for.
        facts: the position of this process, with the number of processes that the launcher started.
        config: the name of the config, for the message.

    Raises:
        ProjectError: FG461 if the numbers differ.
    """
    wished, got = asked.per_node, facts.local_world_size
    is_met = isinstance(wished, str) or wished == got or asked.world_size == facts.world_size
    # A number that only a template of the library gives is a default, which several processes may replace. One process
    # in place of several is still refused.
    if is_met or (asked.is_default and got > 1):
        return
    many = f"{got} process{'es' if got > 1 else ''}"
    own = Path(sys.argv[0])
    is_script = own.suffix == ".py" and own.name != "__main__.py"
    script = shlex.quote(str(own)) if is_script else f"-m forgather -t {shlex.quote(config)} train"
    raise ProjectError(
        f"{facts.launcher} started {many} on this machine, and {asked.source} asks for {wished}",
        code="FG461",
        hint=f"torchrun --nproc-per-node {wished} {script} ..., or keep {got}: add --nproc-per-node {got} at the end",
        expected=wished,
        found=got,
    )
