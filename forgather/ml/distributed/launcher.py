"""Launcher: starts the processes of a run on this machine through `torch.distributed.run` (torchrun).

`launch` takes the arguments of torchrun's command line and returns a `LaunchResult` with the failed processes. Other
functions return the error to print for them. torchrun parses the arguments, and torchrun's agent starts, watches and
ends the processes. A failure is reported as an error with a code, not as a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes_api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as launcher_api
from torch.distributed.launcher.api import elastic_launch

from forgather.errors import DistributedError, first_line
from forgather.interrupt import SAME_OF_SEVERAL_SECONDS, STATUS
from forgather.ml.distributed import root_cause
from forgather.ml.distributed.phase import read_phase
from forgather.ml.distributed.root_cause import FailureKind, FailureRecord, read_crash, read_record
from forgather.run_status import record_cause


@dataclass(frozen=True)
class Failure:
    """A process that did not end with status 0.

    Args:
        rank: the rank of the process among all processes.
        status: the exit status of the process, or the negative signal number if a signal ended the process.
        record: the failure record that the process wrote, or None if it wrote none.
        where: the last optimizer step and phase that the process published.
        crash: the stack frames of a crash in native code, innermost first.
    """

    rank: int
    status: int
    record: FailureRecord | None = None
    where: str = ""
    crash: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch.

    Args:
        failures: the processes that failed; the root cause comes first.
        stopped_by: the number of the signal that ended the launcher, or None if no signal ended it.
    """

    failures: tuple[Failure, ...] = ()
    stopped_by: int | None = None


# Seconds between SIGTERM and SIGKILL: a run that is asked to stop finishes its step and saves, which takes its time.
_PATIENCE = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
_rendezvous: set[object] = set()


def launch(
    words: Sequence[str],
    module: str,
    arguments_of_module: Sequence[str],
    *,
    again: Callable[[Sequence[Failure], int, int], bool] | None = None,
) -> LaunchResult:
    """Runs a module in the processes that torchrun starts, and returns when they have ended.

    Args:
        words: the command-line arguments for torchrun.
        module: the dotted name of the module that each process runs.
        arguments_of_module: the command-line arguments for the module.
        again: a function that is called before torchrun restarts the processes. Its arguments are the failures, the
            number of the next attempt and the maximum number of attempts. The run ends if it returns False. By default
            torchrun restarts the processes whenever an attempt is left.

    Raises:
        DistributedError: FG463 if torchrun does not accept the arguments, FG464 if the processes cannot be started.
    """
    arguments = _parse_arguments([*words, "-m", module, *arguments_of_module])
    # A word without dashes among torchrun's arguments would otherwise be started in place of the run.
    if arguments.training_script != module:
        raise DistributedError(
            f"torchrun would start {arguments.training_script!r} as the program",
            code="FG463",
            hint="words after '--' are passed to torchrun: give only options and their values",
        )
    os.environ.setdefault(*_PATIENCE)
    _silence_torchrun()
    arguments.signals_to_handle = _forwarded_signals(arguments.signals_to_handle)
    # `torchrun.run` does this; it is bypassed here, because it builds the configuration and starts in one call.
    if arguments.standalone:
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = "c10d", "localhost:0", str(os.getpid())
    try:
        config, command, command_words = torchrun.config_from_args(arguments)
    except (ValueError, AssertionError, RuntimeError) as error:
        found = f"torchrun refuses its settings: {error}"
        raise DistributedError(found, code="FG463", hint="see 'torchrun --help'") from error
    log_dir = config.logs_specs.root_log_dir if config.logs_specs else os.devnull
    attempts = _Attempts(config.max_restarts + 1, log_dir, again or (lambda *_: True))
    try:
        with _restart_hook(attempts), _debounced_signals():
            elastic_launch(config, command)(*command_words)
    except ChildFailedError as failed:
        return LaunchResult(failures=_recorded_failures(failed.failures, log_dir))
    except _RestartRefusedError as ended:
        return LaunchResult(failures=ended.failures)
    except SignalException as stopped:
        return LaunchResult(stopped_by=int(stopped.sigval))
    except (RuntimeError, OSError, ValueError) as error:
        raise _not_started(arguments, error) from error
    finally:
        if arguments.log_dir is None and config.logs_specs is not None:
            shutil.rmtree(config.logs_specs.root_log_dir, ignore_errors=True)
    return LaunchResult()


def _forwarded_signals(names: str) -> str:
    """Returns the names of the signals that the agent forwards: torchrun's and SIGUSR1, but no SIGHUP under nohup."""
    every = dict.fromkeys([*names.split(","), "SIGUSR1"])
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    return ",".join(name for name in every if not (name == "SIGHUP" and ignored))


def _silence_torchrun() -> None:
    """Silences torchrun's log messages about processes that end, because one error with rank and step is printed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")):
            # torchrun sets a level on each of its loggers, so a level on a parent has no effect.
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    # argparse prints its usage and exits; only its last line is the reason.
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return torchrun.get_args_parser().parse_args(list(words))
    except SystemExit as ended:
        if not ended.code:
            raise
        lines = output.getvalue().strip().splitlines() or ["no reason given"]
        reason = lines[-1].partition("error: ")[2] or lines[-1]
        raise DistributedError(
            f"torchrun does not accept these arguments: {reason}",
            code="FG463",
            hint="words after '--' are passed to torchrun unchanged; see 'torchrun --help'",
        ) from None


class _RestartRefusedError(Exception):
    """An exception that is raised inside torchrun's agent to end the run instead of restarting the processes."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        super().__init__(failures)
        self.failures = failures


@dataclass
class _Attempts:
    """The attempts of one run.

    Args:
        most: the maximum number of attempts.
        log_dir: the folder in which the processes write their failure records.
        again: the function that allows or refuses a restart, as in `launch`.
        begun: the number of attempts that have been started.
    """

    most: int
    log_dir: str
    again: Callable[[Sequence[Failure], int, int], bool]
    begun: int = 1

    def failed(self, result: RunResult) -> None:
        """Counts a failed attempt and calls `again`, unless it was the last attempt.

        Args:
            result: the result of the failed attempt.

        Raises:
            _RestartRefusedError: if `again` refuses the next attempt.
        """
        if self.begun >= self.most:
            return
        self.begun += 1
        failures = _recorded_failures(result.failures, self.log_dir)
        if not self.again(failures, self.begun, self.most):
            raise _RestartRefusedError(failures)


@contextlib.contextmanager
def _patched(module: ModuleType, name: str, value: object) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


def _restart_hook(attempts: _Attempts) -> AbstractContextManager[None]:
    """Returns a context manager that replaces the agent class, because torchrun has no hook for a failed attempt."""

    # Defined here because it needs `attempts`, and torchrun creates the agent itself.
    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            # After a signal, the thread of its heartbeats goes on. With the last reference, it would join itself.
            _rendezvous.add(worker_group.spec.rdzv_handler)
            result: RunResult = super()._monitor_workers(worker_group)
            if result.is_failed():
                attempts.failed(result)
            return result

    return _patched(launcher_api, "LocalElasticAgent", Agent)


def _debounced_signals() -> AbstractContextManager[None]:
    """Returns a context manager in which torchrun ignores a signal that comes shortly after another signal.

    torchrun's signal handler raises an exception, so a second signal would interrupt the shutdown of the processes
    that the first signal began.
    """
    usual = processes_api._terminate_process_handler
    heard = -SAME_OF_SEVERAL_SECONDS

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if time.monotonic() - heard >= SAME_OF_SEVERAL_SECONDS:
            heard = time.monotonic()
            usual(number, frame)

    return _patched(processes_api, "_terminate_process_handler", handler)


def _recorded_failures(failed: Mapping[int, ProcessFailure], log_dir: str) -> tuple[Failure, ...]:
    """Returns the failures of an attempt, and records a cause that no process could record in the run folder."""
    failures = _failures(failed, log_dir)
    main = _folder_of(log_dir, 0)
    run_dir = None if main is None else root_cause.read_run_dir(main)
    error = unreported_cause(LaunchResult(failures), None)
    if run_dir is not None and error is not None:
        record_cause(run_dir, message=error.message, code=error.code, rank=failures[0].rank)
    return failures


def _failures(failed: Mapping[int, ProcessFailure], log_dir: str) -> tuple[Failure, ...]:
    found = []
    for rank, failure in failed.items():
        folder = _folder_of(log_dir, failure.local_rank)
        if folder is None:
            found.append(Failure(rank, failure.exitcode))
            continue
        where, crash = str(read_phase(folder)), tuple(read_crash(folder))
        found.append(Failure(rank, failure.exitcode, read_record(folder), where, crash))
    return tuple(sorted(found, key=_order))


def _folder_of(log_dir: str, local_rank: int) -> Path | None:
    """Returns the log folder of a process in the latest attempt, or None if there is no such folder."""
    attempts = Path(log_dir).glob(f"*/attempt_*/{local_rank}")
    # By time: torchrun's folder names contain a random run id.
    return max(attempts, key=lambda folder: folder.stat().st_mtime_ns, default=None)


def _order(failure: Failure) -> tuple[int, float]:
    """Returns the sort key of a failure: causes, then processes that died without a record, then consequences."""
    record = failure.record
    if record is None:
        # The agent ends the remaining processes with SIGTERM, and some of them take it for a request to stop and save.
        return (4 if failure.status in (-signal.SIGTERM, STATUS) else 1, 0.0)
    # The process that has printed its error is the cause for the user, whatever its kind.
    if record.told:
        return 0, record.instant
    return _ORDER[record.kind], record.instant


_ORDER = {
    FailureKind.CAUSE: 0,
    FailureKind.STATUS: 1,
    FailureKind.STOPPED: 2,
    FailureKind.WAITED: 3,
    FailureKind.LOST: 3,
}


def exit_status(ended: LaunchResult) -> int:
    """Returns the exit status of the run: that of the root cause, or a status above 128 if a signal ended the run."""
    if ended.stopped_by is not None:
        # The training processes end with this status for each signal of a scheduler, and the launcher agrees with them.
        return STATUS if ended.stopped_by in (signal.SIGUSR1, signal.SIGHUP) else 128 + ended.stopped_by
    first = next(iter(ended.failures), None)
    if first is None:
        return 0
    return first.status if first.status > 0 else 128 - first.status


def unreported_cause(ended: LaunchResult, world_size: int | None) -> DistributedError | None:
    """Returns the error of a failed run, or None if nothing failed, the run was stopped, or a process has printed it.

    Args:
        ended: the result of the launch.
        world_size: the number of processes, or None if it is unknown.
    """
    first = next(iter(ended.failures), None)
    # A launcher that was stopped by a signal has stopped its processes itself: nothing failed.
    if first is None or ended.stopped_by is not None:
        return None
    record = first.record
    if record is not None and (record.told or record.kind is FailureKind.STOPPED):
        return None
    return _unreported_error(first, world_size)


def describe_failures(failures: Sequence[Failure], world_size: int | None) -> str:
    """Returns a one-line description of the root cause.

    Args:
        failures: the failed processes; the root cause comes first.
        world_size: the number of processes, or None if it is unknown.
    """
    if not failures:
        return "a process did not answer"
    first = failures[0]
    if first.record is not None and first.record.told:
        place = f" in {first.record.where}" if first.record.where else ""
        return f"rank {first.rank}{place}: {first.record.message}"
    return _unreported_error(first, world_size).message


def _unreported_error(first: Failure, world_size: int | None) -> DistributedError:
    record = first.record
    who = f"rank {first.rank}" + (f" of {world_size}" if world_size else "")
    place = f" in {first.where}" if first.where else ""
    if record is not None:
        why = "" if record.kind is FailureKind.STATUS else f" {record.kind}"
        hint = (
            "the program exited with this status and gave no reason"
            if record.kind is FailureKind.STATUS
            else _ELSEWHERE
        )
        return DistributedError(f"{who}{why}{place}: {record.message}", code="FG710", hint=hint)
    how = (
        f"was ended by {root_cause.signal_name(first.status)}"
        if first.status < 0
        else f"exited with status {first.status}"
    )
    return DistributedError(
        f"{who} {how}{place}, without an error message",
        code="FG710",
        hint=_HINTS.get(-first.status, "something ended the process: os._exit, or a library in native code"),
        context=tuple(f"crashed at {frame}" for frame in first.crash[:3]),
    )


_ELSEWHERE = "look at what the processes of the other machines print"
_HINTS: dict[int, str] = {
    signal.SIGKILL: "sent by the system when memory is full (see dmesg), by a scheduler, or by a person",
    signal.SIGSEGV: "native code crashed: look at the library that the innermost frame calls",
    signal.SIGABRT: "native code aborted: look at its output above; NCCL aborts after a collective timed out",
    signal.SIGBUS: "native code crashed, often because shared memory is full: enlarge /dev/shm, or use fewer workers",
    signal.SIGTERM: "something ended this process only",
}


def _not_started(arguments: argparse.Namespace, error: Exception) -> DistributedError:
    reason = first_line(error)
    where = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port or 29500}"
    busy = "EADDRINUSE" in reason or "in use" in reason
    return DistributedError(
        f"the port of {where} is in use" if busy else f"the processes could not be started at {where}: {reason[:200]}",
        code="FG464",
        hint="choose another one with --master-port"
        if busy
        else "check --master-addr, and that the machine can be reached",
    )


def count_devices() -> int:
    """Returns the number of accelerators of this machine, which can be 0."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
