"""The current process as a peer of a run: values that processes exchange over the store, and failure handling.

`join` returns a `Peer` for the current process. It distributes values of rank 0 and makes exactly one process print the
root cause of a failure. A `Peer` communicates through the TCP store of the launcher, never through a
collective, because it works before there is a process group and while collectives hang. A run of one process needs no
store.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from forgather.errors import DistributedError, ForgatherError
from forgather.interrupt import current_handler, end_promptly, ignore_signals, status_of
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed import phase, root_cause, stack_dump
from forgather.ml.distributed.env import launcher_folder, process_facts
from forgather.ml.distributed.group import rendezvous_error, rendezvous_store, shutdown
from forgather.ml.distributed.root_cause import FailureKind, FailureRecord, classify, record_of, write_record
from forgather.ml.distributed.watchdog import (
    ENDED,
    FAILED,
    GRACE_SECONDS,
    PRINTED,
    STACKS_WANTED,
    STOPPED,
    Watchdog,
    kill_in_a_second,
)
from forgather.redaction import hide_known

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
_LEAVING_SECONDS = 60.0
_LOOK_SECONDS = 2.0  # a crash in native code is written to a file first, and the watchdog wakes up twice a second


class Peer:
    """The current process as one of the processes of a run.

    Args:
        facts: the position of this process.
        store: the store that all processes of the run share, or None for a run of one process.
        timeout_seconds: the maximum wait for a value of another process, in seconds.
        folder: the folder in which this process writes its failure record for the launcher, or None to write no record.
        connect: a function that returns a new connection to the store, for the watchdog thread.
    """

    def __init__(
        self,
        facts: ProcessFacts,
        store: Store | None,
        timeout_seconds: float,
        *,
        folder: Path | None = None,
        connect: Callable[[], Store] | None = None,
    ) -> None:
        self.facts = facts
        self._connect = connect
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.folder = folder
        self.report_to: Path | None = None
        """The folder in which a report on a hang is written, or None until the folder of the run is known."""
        self.status = 1
        """The exit status of this process if it ends because another process failed or was stopped."""
        self._watchdog: Watchdog | None = None

    def watch(self) -> None:
        """Starts the watchdog, and publishes the phase of this process for the launcher."""
        if self.folder is not None:
            phase.publish_phase(self.folder)
        if self._connect is not None and self.facts.world_size > 1:
            # A connection of its own: a client of the store handles one request at a time, and the main thread's may
            # block.
            self._watchdog = Watchdog(self._connect(), self.facts, self.folder)
            self._watchdog.start()
        if (heard := current_handler()) is not None:
            heard.is_quiet = self.failed_elsewhere

    def begin_construction(self, run_dir: str) -> None:
        """Sets the phase to "construction", and makes `run_dir` the folder for reports on hangs."""
        self.report_to = Path(run_dir)
        phase.set_phase("construction")
        if self.folder is not None and self.is_main:
            root_cause.write_run_dir(self.folder, run_dir)

    def begin_run(self) -> None:
        """Sets the phase to "run", after the objects of the config have been constructed."""
        phase.set_phase("run")

    def leave(self) -> None:
        """Reports to the other processes that this process is done, and destroys the default process group."""
        # A process that stops alone does not shut the group down: that would wait for the others.
        if self.status <= 128:
            shutdown()
        self._set(f"done/{self.facts.rank}", "1")
        if self._watchdog is not None:
            self._watchdog.stop()

    def report_status(self, status: int) -> None:
        """Writes a record of a non-zero exit status, so that the launcher does not take the exit for a crash.

        If all processes were asked to stop, the other ranks wait until rank 0 has reported that it is done: a launcher
        ends all processes as soon as one of them ends, and rank 0 still has to print.

        Args:
            status: the exit status, which is above 128 if a signal stopped the process.
        """
        # Without a record a status alone looks like the death of a process.
        if status and self.folder is not None:
            kind = FailureKind.STOPPED if status > 128 else FailureKind.STATUS
            message = f"ended with status {status}"
            write_record(self.folder, FailureRecord(kind, message, str(phase.current_phase()), False, time.time()))
        if 0 < status <= 128:
            self._set(ENDED, str(status))
        if status <= 128:
            return
        heard = current_handler()
        if heard is not None and heard.at_once:
            self._stop_alone(status)
        else:
            ignore_signals()
            if not self.is_main:
                self._wait_for_key("done/0", _LEAVING_SECONDS)
            self._tell_agent()

    def failed_elsewhere(self) -> bool:
        """Returns True if another process has failed.

        This tells two meanings of SIGTERM apart: a launcher sends it to end the remaining processes after a failure,
        and a scheduler or a user sends it to make a run save and stop.
        """
        return self._watchdog is not None and self._watchdog.failed_elsewhere()

    def _stop_alone(self, status: int) -> None:
        """Reports to the other processes that this one was stopped, so that they do not report a lost connection."""
        self.status = status
        if self._watchdog is not None:
            self._watchdog.stop()
        self._set(STOPPED, str(status))
        self._set(f"done/{self.facts.rank}", "1")
        self._keep_store()
        ignore_signals()
        self._tell_agent()
        atexit.register(end_promptly, status)

    def _keep_store(self) -> None:
        """Waits until the other processes have ended, if this process hosts the store that they still read."""
        if self.is_main and self._watchdog is not None and not self.facts.agent_hosts_store:
            self._watchdog.stop()
            self._watchdog.wait_for_the_others(GRACE_SECONDS + _LOOK_SECONDS)

    def _tell_agent(self) -> None:
        """Ends torchrun's agent, which would otherwise restart a stopped process because its exit status is not 0."""
        if self.facts.attempts_left:
            os.kill(os.getppid(), signal.SIGTERM)

    def _set(self, name: str, value: str) -> None:
        if self.store is not None:
            # The process that hosts the store may have ended first.
            with suppress(RuntimeError):
                self.store.set(name, value)

    def _wait_for_key(self, name: str, seconds: float) -> bool:
        """Waits until another process has set a key; returns False if the key is not set in time."""
        assert self.store is not None, "a single process does not wait"  # noqa: S101
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.store.check([name]):
                    return True
            except RuntimeError:
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def report_failure(self, error: BaseException) -> bool:
        """Handles an exception that ends this process; returns True if this process is to print the exception.

        The process that raised the root cause prints it, and no other process prints an error. An error that is a
        consequence is printed only if no root cause is found. The printed exception gets a note with rank, step and
        phase.

        Args:
            error: the exception.
        """
        where = phase.current_phase()
        kind = classify(error)
        if kind is FailureKind.STOPPED:
            self._stop_alone(status_of(error))
        if kind is FailureKind.WAITED:
            self._explain_hang(error)
        prints = self._prints_error(kind)
        if kind is not FailureKind.STOPPED:
            # The interpreter's teardown would take seconds, or hang in a thread of a broken process group.
            atexit.register(end_promptly, self.status)
        record = record_of(error, where, told=prints)
        if self.folder is not None:
            write_record(self.folder, record, error)
        if prints:
            root_cause.record_in_run(self.report_to, record, self.facts.rank)
            place = f"rank {self.facts.rank} of {self.facts.world_size}"
            _note(error, f"{place}, {where}" if str(where) else place)
            gone = (
                self._watchdog.dead_peer(_LOOK_SECONDS)
                if kind is FailureKind.LOST and self._watchdog is not None
                else None
            )
            if gone is not None:
                _note(error, f"rank {gone} of {self.facts.world_size} ended without an error message")
            self._fail()
            self._keep_store()
        elif kind is FailureKind.STOPPED:
            return self.is_main and not self.failed_elsewhere()
        return prints

    def _prints_error(self, kind: FailureKind) -> bool:
        if kind is FailureKind.STOPPED:
            return False
        if self.store is None:
            return True
        try:
            if kind is FailureKind.LOST and not self._waits_for_cause():
                return False
            return bool(self.store.add(PRINTED, 1) == 1)
        except RuntimeError:
            # The store is gone. Its host, rank 0, would have waited for the others if it had printed a cause; rank 1
            # prints then.
            return kind is FailureKind.CAUSE or (self.facts.rank == 1 and not self.facts.agent_hosts_store)

    def _waits_for_cause(self) -> bool:
        """Waits until another process prints the root cause, is stopped, or has died.

        Returns True if this process is to print its own error: if none of this happens in time, or if a process has
        died and there is no torchrun launcher that could report the death.
        """
        assert self.store is not None, "a single process does not wait"  # noqa: S101
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if self.store.check([STOPPED]):
                self.status = int(self.store.get(STOPPED))
                return False
            # A process that is gone cannot print the cause any more, but our launcher sees how it ended. `PRINTED` is
            # checked after it, since the process may have printed just before it ended.
            is_gone = self._watchdog is not None and self._watchdog.dead_peer() is not None
            if self.store.check([PRINTED]):
                return False
            if is_gone:
                return self.folder is None
            time.sleep(_POLL_SECONDS)
        return True

    def _fail(self) -> None:
        # The launcher sends SIGTERM to the others as soon as one has failed; this process has to print its error first.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(FAILED, "1")

    def _explain_hang(self, error: BaseException) -> None:
        """Collects the state of all processes, adds a summary to the error, and writes a report to a file."""
        if self.store is None:
            return
        # An error of the store or of the disk must not replace the error that is being explained.
        with suppress(RuntimeError, OSError):
            if self.store.add("explains", 1) > 1:
                # Another process has timed out too and is collecting; it ends the run when it has printed.
                time.sleep(_ANSWER_SECONDS + 2 * GRACE_SECONDS)
                return
            states = self._states()
            _note(error, stack_dump.summarize_hang(states))
            self._end_later([rank for rank, state in states.items() if state is None])
            if self.report_to is not None:
                file = self.report_to / "hang.txt"
                file.write_text(hide_known("\n".join(stack_dump.format_report(states))), encoding="utf-8")
                _note(error, f"what every rank was doing, with stacks: {file}")

    def _end_later(self, silent: list[int]) -> None:
        """Registers an exit handler that kills the unresponsive ranks of this machine after this process has ended."""
        for rank in silent:
            if self.store is not None and self.store.check([f"place/{rank}"]):
                place = json.loads(self.store.get(f"place/{rank}"))
                if place["host"] == socket.gethostname():
                    atexit.register(kill_in_a_second, int(place["pid"]))

    def _states(self) -> dict[int, dict[str, Any] | None]:
        assert self.store is not None, "a single process asks no others"  # noqa: S101
        states: dict[int, dict[str, Any] | None] = {rank: None for rank in range(self.facts.world_size)}
        states[self.facts.rank] = stack_dump.local_state()
        self.store.set(STACKS_WANTED, "1")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and None in states.values():
            for rank in [rank for rank, state in states.items() if state is None]:
                if self.store.check([f"stacks/{rank}"]):
                    states[rank] = json.loads(self.store.get(f"stacks/{rank}"))
            time.sleep(_POLL_SECONDS)
        return states

    @property
    def is_main(self) -> bool:
        """True on rank 0, the main process, which writes files and prints."""
        return self.facts.rank == 0

    def share(self, name: str, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends a value of rank 0 to all ranks through the store; every rank returns the value.

        Args:
            name: the key in the store; each key can be used once.
            value: the JSON-compatible value that rank 0 sends. The other ranks ignore the argument.

        Raises:
            DistributedError: FG706 if rank 0 does not set the value in time.
        """
        if self.is_main:
            assert value is not None, "rank 0 has something to share"  # noqa: S101
            if self.store is not None:
                self.store.set(name, json.dumps(value))
            return dict(value)
        return self._wait_for_value(name)

    def _wait_for_value(self, name: str) -> dict[str, Any]:
        assert self.store is not None, "only rank 0 may be without a store"  # noqa: S101
        deadline = time.monotonic() + self.timeout_seconds
        # Polling: a blocking `get` would occupy the connection for minutes, and Python could not handle signals
        # meanwhile.
        while not self.store.check([name]):
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"rank {self.facts.rank} of {self.facts.world_size} waited {self.timeout_seconds:g} s for rank 0",
                    code="FG706",
                    hint="look at what rank 0 printed",
                )
            time.sleep(_POLL_SECONDS)
        value = json.loads(self.store.get(name))
        return dict(value)


def _note(error: BaseException, text: str) -> None:
    """Adds a line to an exception: to the `context` of a ForgatherError, or as a note to any other exception."""
    if isinstance(error, ForgatherError):
        error.context = (*error.context, text)
    else:
        error.add_note(text)


def join(*, timeout_seconds: float = 300) -> Peer:
    """Connects to the store of the run and returns a `Peer` for the current process.

    Args:
        timeout_seconds: the maximum wait for the store, and for a value of another process, in seconds.

    Raises:
        DistributedError: FG706 if the store cannot be reached, FG701 if environment variables contradict each other.
    """
    facts, folder = process_facts(), launcher_folder()
    try:
        store = rendezvous_store(facts, timeout_seconds)
    except (RuntimeError, ValueError, OSError) as error:
        raise rendezvous_error(facts.rank, facts.world_size, "{}:{}".format(*facts.master or ("", 0)), error) from error
    if store is None:
        if facts.world_size > 1:
            raise DistributedError(
                f"rank {facts.rank} of {facts.world_size} cannot find the others: MASTER_ADDR is not set",
                code="FG706",
                hint="start the processes with torchrun, which sets it",
            )
        return Peer(facts, None, timeout_seconds, folder=folder)
    return Peer(
        facts,
        _with_prefix(store, facts),
        timeout_seconds,
        folder=folder,
        connect=lambda: _with_prefix(store.clone(), facts),  # type: ignore[attr-defined]
    )


def _with_prefix(store: TCPStore, facts: ProcessFacts) -> Store:
    # torchrun's store outlives an attempt, so each attempt has a prefix of its own.
    return PrefixStore(f"forgather/attempt_{facts.attempt or 0}", store)
