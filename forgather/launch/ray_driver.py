"""The Ray driver: one `fgcli train` on each machine of a Ray cluster, started from a placement group.

`ray_program` takes a `LaunchJob` and gives a Python program for `ray job submit`, which calls `start`. `start` reserves
one bundle on each of several machines, and starts `fgcli train` there with the rank of the machine. The processes of a
machine, their process group and their restarts are those of `fgcli train`: Ray's TorchTrainer, which would take them
over, is not used. Ray is imported by `start` alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from forgather.launch.bound_process import BoundProcess
from forgather.launch.launch_job import CPUS, LaunchJob, refuse_word_as_number, shell_text
from forgather.project.trust import VARIABLE

MODULE = "forgather"
"""The module that each machine runs."""
_WAIT_SECONDS = 0.5
_PATIENCE_SECONDS = 30
_GRACE_SECONDS = 300.0


def ray_program(job: LaunchJob) -> str:
    """Returns a Python program that starts a run on a Ray cluster.

    Raises:
        ProjectError: FG530 if the number of machines or processes is not known.
    """
    processes = refuse_word_as_number(job, "Ray")
    shared = f"# All machines must see these folders at the same place: {shell_text(job.folders)}\n"
    return (
        f"# Starts {job.name}:  ray job submit -- python FILE\n"
        "# Each machine needs an environment in which `python -m forgather` works.\n"
        f"{shared if job.asked.num_nodes != 1 else ''}"
        "from forgather.launch.ray_driver import start\n"
        "\n"
        'if __name__ == "__main__":\n'
        "    raise SystemExit(\n"
        "        start(\n"
        f"            {list(job.words)!r},\n"
        f"            handed={list(job.handed)!r},\n"
        f"            folder={job.folder!r},\n"
        f"            nodes={job.asked.num_nodes},\n"
        f"            resources={{'CPU': {processes * CPUS}, 'GPU': {processes}}},\n"
        f"            variables={list(job.variables)!r},  # names; their values come from the driver's environment\n"
        f"            trust={job.trust!r},\n"
        "        )\n"
        "    )\n"
    )


def start(
    words: Sequence[str],
    *,
    folder: str,
    nodes: int,
    resources: dict[str, float],
    handed: Sequence[str] = (),
    variables: Sequence[str] = (),
    trust: str = "",
) -> int:
    """Starts `fgcli` on each machine of a Ray cluster, waits until all have ended, and returns the exit status.

    SIGTERM and SIGINT, with which Ray ends a job, are passed on, so that the run finishes its step and saves. If one
    machine fails, the others are ended.

    Args:
        words: the arguments of `fgcli`.
        folder: the working folder.
        nodes: the number of machines.
        resources: what each machine reserves, in Ray's names: "CPU" and "GPU".
        handed: the words at the end of the command line, for torchrun.
        variables: the names of environment variables that the machines get from the driver.
        trust: the value of `FORGATHER_TRUST` on the machines; "" to leave theirs.
    """
    ray = import_module("ray")
    groups = import_module("ray.util.placement_group")
    scheduling = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    ray.init(ignore_reinit_error=True)
    # STRICT_SPREAD: no two bundles are on one machine.
    group = groups.placement_group([dict(resources)] * nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(_PATIENCE_SECONDS):
            sys.stderr.write(f"waiting for {nodes} machines with {resources} each; `ray status` shows what is free\n")
        ray.get(group.ready())
        passed = {name: os.environ[name] for name in variables if name in os.environ}
        passed |= {VARIABLE: trust} if trust else {}
        # `stop` must run while `wait` does.
        remote = ray.remote(max_concurrency=2, num_cpus=resources.get("CPU", 1), num_gpus=resources.get("GPU", 0))(
            NodeRunner
        )
        runners = [
            remote.options(
                scheduling_strategy=scheduling(placement_group=group, placement_group_bundle_index=rank)
            ).remote()
            for rank in range(nodes)
        ]
        host, port = ray.get(runners[0].address.remote())
        place = ["--nnodes", str(nodes), "--master-addr", host, "--master-port", str(port)] if nodes > 1 else []
        for rank, runner in enumerate(runners):
            ranked = [*place, "--node-rank", str(rank)] if place else []
            ray.get(runner.start.remote([*words, *ranked, *handed], folder, passed))
        return _status(ray, runners)
    finally:
        groups.remove_placement_group(group)


def _status(ray: Any, runners: Sequence[Any]) -> int:
    """Waits until all machines have ended, and returns the status of the first one that failed, or 0."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: asked.append(got))
    waiting = {runner.wait.remote(): runner for runner in runners}
    status, is_ending = 0, False
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=_WAIT_SECONDS)
        for one in done:
            del waiting[one]
            status = status or _ended(ray, one)
        if (status or asked) and not is_ending:
            is_ending = True
            for runner in waiting.values():
                runner.stop.remote(asked[0] if asked else signal.SIGTERM)
    return status


def _ended(ray: Any, reference: Any) -> int:
    try:
        return int(ray.get(reference))
    # The machine, or the process of Ray on it, is gone.
    except ray.exceptions.RayError as error:
        sys.stderr.write(f"error: a machine of the run is gone: {error}\n")
        return 1


class NodeRunner:
    """An actor on one machine, which starts `fgcli` there and waits for it."""

    def __init__(self) -> None:
        self._process: BoundProcess | None = None

    def address(self) -> tuple[str, int]:
        """Returns the address of this machine in the cluster, and a port that is free there."""
        host = import_module("ray.util").get_node_ip_address()
        with socket.socket() as free:
            free.bind(("", 0))
            return host, free.getsockname()[1]

    def start(self, words: Sequence[str], folder: str, environ: dict[str, str]) -> None:
        """Starts `fgcli` with the arguments `words`; it ends with this actor."""
        os.chdir(folder)
        command = [sys.executable, "-m", MODULE, *words]
        sys.stdout.write(f"{shell_text(command)}\n")
        self._process = BoundProcess(command, env={**os.environ, **environ}, stdout=1, stderr=2)

    def wait(self) -> int:
        """Returns the exit status of `fgcli`, as a shell gives it."""
        assert self._process is not None  # noqa: S101 - `start` comes first
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def stop(self, number: int) -> None:
        """Passes a signal on, and ends the processes that have not ended after five minutes."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        try:
            self._process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.end()
