"""A run in several processes: started from here, or met by a process that a launcher has started.

Takes what a run asks for; gives how the processes ended, or this process among the others. Keeps true: torch is
imported only now, through names; what was obtained is compared with what was asked before anything is constructed.
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
from forgather.launcher_env import DEFAULT_PORT, OURS, NodeFacts, ProcessFacts, process_facts, tasks_on_this_machine

CHECKED = OURS
SAFE_PATH = ("PYTHONSAFEPATH", "forgather")


@dataclass(frozen=True)
class Ending:
    """How a run in several processes ended.

    Args:
        status: exit status.
        error: why, where none of the processes could tell it.
    """

    status: int
    error: ForgatherError | None = None


def start(
    asked: ProcessRequest, arguments: Sequence[str], *, again: Callable[[Any, int, int], bool] | None = None
) -> Ending:
    """Starts the processes, each with the same `fgcli` arguments, and waits for their end.

    Args:
        asked: how many, and where.
        arguments: of `fgcli`.
        again: tells whether processes that failed are started again, see `forgather.launch.restart`.

    Raises:
        DistributedError: they could not be started.
    """
    launcher = import_module("forgather.ml.distributed.launcher")
    if asked.per_node in ("gpu", "xpu") and not launcher.count_devices():
        raise ProjectError(
            f"{asked.source} is {asked.per_node}, and this machine has none that PyTorch can use",
            code="FG466",
            hint="give a number: --nproc-per-node 2 trains with two processes on the CPU",
        )
    _let_children_find_us()
    # Python would look for modules, and for this package, in the working folder first.
    os.environ.setdefault(*SAFE_PATH)
    ended = launcher.launch(torchrun_words(asked), "forgather", arguments, again=again)
    return Ending(launcher.status_of(ended), launcher.first_cause(ended, asked.world_size))


def _let_children_find_us() -> None:
    """A clone that was never installed is found by the processes, too."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not os.path.isfile(os.path.join(home, "pyproject.toml")):
        return
    known = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([home, *known]))


@contextmanager
def joined() -> Iterator[Any]:
    """Meets the other processes of the run that this one is part of, for the block; a failure in it ends all of them.

    Raises:
        DistributedError: they cannot be met.
        NotTheFirst: the block failed, and another process tells why.
    """
    refuse_two_launchers(os.environ)
    _tell_libraries(process_facts(os.environ))
    member = import_module("forgather.ml.distributed.peer").join()
    member.watch()
    try:
        yield member
    except GeneratorExit:  # the block is given up, as where a signal ends the process on its way out of it
        raise
    except BaseException as error:
        if member.fails(error):
            raise
        if member.speaks and member.status > 128:
            raise Terminated from error
        raise SecondaryFailure(member.status) from error
    member.leave()
    _left.append(member)


_left: list[Any] = []


def end_where_left(status: int) -> None:
    """Has this process end with a status without being torn down, where it has left the others of its run."""
    if _left:
        atexit.register(end_promptly, status)


def as_one_of_several(run: Callable[[Any], int]) -> int:
    """Returns the exit status of `run(member)` in this process, which a launcher has started beside others."""
    try:
        with joined() as member:
            status = run(member)
            member.ended(status)
            return status
    except SecondaryFailure as follows:
        return follows.status


def _tell_libraries(facts: ProcessFacts) -> None:
    """Sets the variables that libraries read, where a launcher has told the same under names of its own."""
    told: dict[str, object] = {
        "RANK": facts.rank,
        "LOCAL_RANK": facts.local_rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_WORLD_SIZE": facts.local_world_size,
    }
    if facts.master is not None:
        told |= {"MASTER_ADDR": facts.master[0], "MASTER_PORT": facts.master[1]}
    for name, value in told.items():
        os.environ.setdefault(name, str(value))


class SecondaryFailure(Exception):  # noqa: N818 - not an error: its cause is one, and is told by another process
    """This process failed because another one did, which tells the user why.

    Args:
        status: what this process ends with.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def refuse_lone_process(asked: ProcessRequest, config: str) -> None:
    """Raises where `accelerate launch` started this process alone, and several were asked for.

    Raises:
        ProjectError: FG461.
    """
    wished = asked.per_node
    if isinstance(wished, str):
        devices = import_module("forgather.ml.distributed.launcher").count_devices()
        wished = devices or (os.cpu_count() or 1 if wished in ("auto", "cpu") else 1)
    lone = ProcessFacts(launcher="accelerate launch, which starts one process where there is no GPU,")
    refuse_difference(replace(asked, per_node=wished), lone, config)


def refuse_two_launchers(environ: Mapping[str, str]) -> None:
    """Raises where SLURM started several tasks on this machine, and each of them started torchrun.

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


def met_as(facts: ProcessFacts) -> NodeFacts:
    """Returns the machines that a launcher spread the processes over."""
    machines = max(facts.world_size // max(facts.local_world_size, 1), 1)
    master = facts.master or ("localhost", DEFAULT_PORT)
    return NodeFacts(machines, facts.rank // max(facts.local_world_size, 1), master, facts.launcher)


def refuse_difference(asked: ProcessRequest, facts: ProcessFacts, config: str) -> None:
    """Raises where a launcher started another number of processes than was asked for.

    Raises:
        ProjectError: FG461.
    """
    wished, got = asked.per_node, facts.local_world_size
    is_met = isinstance(wished, str) or wished == got or asked.world_size == facts.world_size
    # A number that only a template of the library says is no wish; but one process is no several.
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
