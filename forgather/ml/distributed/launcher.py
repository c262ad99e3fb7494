"""Starts the processes of a run on this machine, through `torch.distributed.run`.

Takes the words of torchrun's command line; gives how the processes ended. Keeps true: torchrun parses its own words
and its agent starts, watches and ends the processes; what went wrong is an error of ours, not a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from forgather.errors import DistributedError


@dataclass(frozen=True)
class Failure:
    """One process that did not end with status 0.

    Args:
        rank: its position among all.
        status: its exit status; minus the signal's number where a signal ended it.
        folder: where it may have left a record; "" without one.
    """

    rank: int
    status: int
    folder: str = ""


@dataclass(frozen=True)
class Ended:
    """How the processes of this machine ended.

    Args:
        failures: those that failed, the first one first.
        stopped_by: the signal that ended the launcher; None where none did.
    """

    failures: tuple[Failure, ...] = ()
    stopped_by: int | None = field(default=None)


def launch(words: Sequence[str]) -> Ended:
    """Runs torchrun's command line and waits until its processes have ended.

    Raises:
        DistributedError: FG463 for words that torchrun does not take, FG464 where it cannot start.
    """
    arguments = _parsed(words)
    # Its notes on every process that ends are told once, by us, with rank and step.
    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if arguments.standalone:
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = "c10d", "localhost:0", str(os.getpid())
    try:
        config, command, command_words = torchrun.config_from_args(arguments)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise DistributedError(
            f"torchrun refuses its settings: {error}", code="FG463", hint="see 'torchrun --help'"
        ) from error
    try:
        elastic_launch(config, command)(*command_words)
    except ChildFailedError as failed:
        return Ended(failures=_failures(failed))
    except SignalException as stopped:
        return Ended(stopped_by=int(stopped.sigval))
    except (RuntimeError, OSError, ValueError) as error:
        raise _not_started(arguments, error) from error
    finally:
        if arguments.log_dir is None and config.logs_specs is not None:
            shutil.rmtree(config.logs_specs.root_log_dir, ignore_errors=True)
    return Ended()


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return torchrun.get_args_parser().parse_args(list(words))
    except SystemExit as ended:
        if not ended.code:
            raise
        lines = told.getvalue().strip().splitlines() or ["no reason given"]
        reason = lines[-1].partition("error: ")[2] or lines[-1]
        raise DistributedError(
            f"torchrun does not take these arguments: {reason}",
            code="FG463",
            hint="what stands after '--' is handed to torchrun as it is; see 'torchrun --help'",
        ) from None


def _failures(failed: ChildFailedError) -> tuple[Failure, ...]:
    ordered = sorted(failed.failures.items(), key=lambda item: item[1].timestamp)
    found = []
    for rank, failure in ordered:
        folder = os.path.dirname(failure.error_file) if failure.error_file not in ("", "<N/A>", os.devnull) else ""
        found.append(Failure(rank, failure.exitcode, folder))
    return tuple(found)


def _not_started(arguments: argparse.Namespace, error: Exception) -> DistributedError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port or 29500}"
    busy = "EADDRINUSE" in reason or "in use" in reason
    return DistributedError(
        f"the port of {where} is in use" if busy else f"the processes could not be started at {where}: {reason[:200]}",
        code="FG464",
        hint="give another with --master-port" if busy else "check --master-addr, and that the machine can be reached",
    )


def signal_name(status: int) -> str:
    """Returns the name of the signal that a negative exit status stands for.

    Example:
        >>> signal_name(-9)
        'SIGKILL'
    """
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def count_devices() -> int:
    """Returns how many accelerators this machine has."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
