"""One process among those of a run: what they tell one another before there is a process group, and when one fails.

Takes the position of the process; gives a `Member`, through which rank 0 hands facts to all others, and which lets one
process tell why the run failed. Keeps true: it uses the store that the launcher keeps, and neither a device nor a
collective; one process alone needs no store.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from forgather.errors import DistributedError, ForgatherError
from forgather.interrupt import end_promptly, ignore_signals, present, status_of
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed import phase, stack_dump
from forgather.ml.distributed.env import launcher_folder, process_facts
from forgather.ml.distributed.group import meeting_store, shutdown
from forgather.ml.distributed.root_cause import Kind, Record, kind_of, record_of, write_record
from forgather.ml.distributed.watchdog import ENDED, FAILED, GRACE_SECONDS, STOPPED, TOLD, WANTED, Guard
from forgather.redaction import hide_known

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
_LEAVING_SECONDS = 60.0
_LOOK_SECONDS = 2.0  # a crash is written down first, and a guard looks twice a second


class Member:
    """This process among the others.

    Args:
        facts: its position.
        store: where all can write and read; None for one process alone.
        timeout_seconds: how long to wait for what another process is to say.
        folder: where this process leaves what its launcher is to know; None for nowhere.
        connect: makes another connection to the store.
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
        """Where a report on a hang is written; the folder of the run, once it is known."""
        self.status = 1
        """What a process ends with that failed because another one did."""
        self._guard: Guard | None = None

    def watch(self) -> None:
        """Begins to look after the other processes, and lets them look after this one."""
        if self.folder is not None:
            phase.publish_in(self.folder)
        if self._connect is not None and self.facts.world_size > 1:
            self._guard = Guard(self._connect(), self.facts, self.folder)
            self._guard.start()
        if (heard := present()) is not None:
            heard.is_quiet = self.failed_elsewhere

    def begins(self, run_dir: str) -> None:
        """Notes that construction begins; reports go to the run's folder from now on."""
        self.report_to = Path(run_dir)
        phase.enter("construction")

    def built(self) -> None:
        """Notes that what was constructed begins to run."""
        phase.enter("run")

    def leave(self) -> None:
        """Says that this process has done its part, and leaves the others."""
        # Whoever stops alone would wait for them.
        if self.status <= 128:
            shutdown()
        self._say(f"done/{self.facts.rank}", "1")
        if self._guard is not None:
            self._guard.stop()

    def ended(self, status: int) -> None:
        """Leaves a record of an exit status that is not 0, so that it is not taken for a crash.

        Of processes that were asked to stop, the one that prints ends first: a launcher ends the others as soon as it
        sees one end.
        """
        if status and self.folder is not None:
            kind = Kind.STOPPED if status > 128 else Kind.STATUS
            message = f"ended with status {status}"
            write_record(self.folder, Record(kind, message, str(phase.current()), False, time.time()))
        if 0 < status <= 128:
            self._say(ENDED, str(status))
        if status <= 128:
            return
        heard = present()
        if heard is not None and heard.at_once:
            self._stops_alone(status)
        else:
            ignore_signals()
            if not self.speaks:
                self._waits_for("done/0", _LEAVING_SECONDS)
            self._tell_agent()

    def failed_elsewhere(self) -> bool:
        """Tells whether another process has failed: a launcher ends the others by the signal that asks to stop."""
        return self._guard is not None and self._guard.failed_elsewhere()

    def _stops_alone(self, status: int) -> None:
        """Tells the others that what they meet next, a lost connection, is no failure."""
        self.status = status
        if self._guard is not None:
            self._guard.stop()
        self._say(STOPPED, str(status))
        self._say(f"done/{self.facts.rank}", "1")
        self._keep_store()
        ignore_signals()
        self._tell_agent()
        atexit.register(end_promptly, status)

    def _keep_store(self) -> None:
        """Waits until the others have ended where this process keeps the store: what it said is heard until then."""
        if self.speaks and self._guard is not None and not self.facts.agent_hosts_store:
            self._guard.stop()
            self._guard.wait_for_the_others(GRACE_SECONDS + _LOOK_SECONDS)

    def _tell_agent(self) -> None:
        """Has torchrun end: for it, a process that was asked to stop is one that failed, which it starts again."""
        if self.facts.attempts_left:
            os.kill(os.getppid(), signal.SIGTERM)

    def _say(self, name: str, value: str) -> None:
        if self.store is not None:
            # The keeper of the store may have ended first.
            with suppress(RuntimeError):
                self.store.set(name, value)

    def _waits_for(self, name: str, seconds: float) -> bool:
        """Waits until another process has said something; False where it does not."""
        assert self.store is not None, "one process alone waits for no other"  # noqa: S101
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self.store.check([name]):
                    return True
            except RuntimeError:
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def fails(self, error: BaseException) -> bool:
        """Ends the run of all processes, and tells whether this one is to print the error.

        The first cause is printed, once. What follows from it in other processes waits, and is printed only where no
        cause is found. The exception gets a note that names rank, step and phase.
        """
        where = phase.current()
        kind = kind_of(error)
        if kind is Kind.STOPPED:
            self._stops_alone(status_of(error))
        if kind is Kind.WAITED:
            self._explain_hang(error)
        told = self._is_first(kind)
        if kind is not Kind.STOPPED:
            atexit.register(end_promptly, self.status)
        if self.folder is not None:
            write_record(self.folder, record_of(error, where, told=told), error)
        if told:
            place = f"rank {self.facts.rank} of {self.facts.world_size}"
            _note(error, f"{place}, {where}" if str(where) else place)
            gone = self._guard.dead_peer(_LOOK_SECONDS) if kind is Kind.LOST and self._guard is not None else None
            if gone is not None:
                _note(error, f"rank {gone} of {self.facts.world_size} is gone, without a word")
            self._fail()
            self._keep_store()
        elif kind is Kind.STOPPED:
            return self.speaks and not self.failed_elsewhere()
        return told

    def _is_first(self, kind: Kind) -> bool:
        if kind is Kind.STOPPED:
            return False
        if self.store is None:
            return True
        try:
            if kind is Kind.LOST and not self._waits_for_cause():
                return False
            return bool(self.store.add(TOLD, 1) == 1)
        except RuntimeError:
            # Had the keeper of the store told anything, it would have waited until all had heard it.
            return kind is Kind.CAUSE or (self.facts.rank == 1 and not self.facts.agent_hosts_store)

    def _waits_for_cause(self) -> bool:
        """Waits for another process to tell the cause, or that it was stopped; True where none does."""
        assert self.store is not None, "one process alone waits for no other"  # noqa: S101
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if self.store.check([STOPPED]):
                self.status = int(self.store.get(STOPPED))
                return False
            # One that has gone without telling anything will not tell it any more.
            # A launcher of ours knows how it ended.
            is_gone = self._guard is not None and self._guard.dead_peer() is not None
            if self.store.check([TOLD]):
                return False
            if is_gone:
                return self.folder is None
            time.sleep(_POLL_SECONDS)
        return True

    def _fail(self) -> None:
        # The launcher ends the others as soon as it sees one that failed; what is being printed comes first.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(FAILED, "1")

    def _explain_hang(self, error: BaseException) -> None:
        """Asks all processes what they do, and adds what they said to the error."""
        if self.store is None:
            return
        # Neither a store that is gone nor a full disk may take the place of the error that is being explained.
        with suppress(RuntimeError, OSError):
            if self.store.add("explains", 1) > 1:
                # Another process has waited as long, and is asking; it ends the run when it has told.
                time.sleep(_ANSWER_SECONDS + 2 * GRACE_SECONDS)
                return
            states = self._states()
            _note(error, stack_dump.in_brief(states))
            self._end_later([rank for rank, state in states.items() if state is None])
            if self.report_to is not None:
                file = self.report_to / "hang.txt"
                file.write_text(hide_known("\n".join(stack_dump.report(states))), encoding="utf-8")
                _note(error, f"what every rank was doing, with stacks: {file}")

    def _end_later(self, silent: list[int]) -> None:
        """Sees to it that ranks on this machine that answer nothing end soon after this process has."""
        for rank in silent:
            if self.store is not None and self.store.check([f"place/{rank}"]):
                place = json.loads(self.store.get(f"place/{rank}"))
                if place["host"] == socket.gethostname():
                    atexit.register(_kill_in_a_second, int(place["pid"]))

    def _states(self) -> dict[int, dict[str, Any] | None]:
        assert self.store is not None, "only several processes are asked"  # noqa: S101
        states: dict[int, dict[str, Any] | None] = {rank: None for rank in range(self.facts.world_size)}
        states[self.facts.rank] = stack_dump.own_state()
        self.store.set(WANTED, "1")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and None in states.values():
            for rank in [rank for rank, state in states.items() if state is None]:
                if self.store.check([f"stacks/{rank}"]):
                    states[rank] = json.loads(self.store.get(f"stacks/{rank}"))
            time.sleep(_POLL_SECONDS)
        return states

    @property
    def speaks(self) -> bool:
        """True for the one process that writes and prints."""
        return self.facts.rank == 0

    def share(self, name: str, value: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns what rank 0 gives as `value`, on every rank.

        Raises:
            DistributedError: FG706 where rank 0 says nothing in time.
        """
        if self.speaks:
            assert value is not None, "rank 0 has something to share"  # noqa: S101
            if self.store is not None:
                self.store.set(name, json.dumps(value))
            return dict(value)
        return self._heard(name)

    def _heard(self, name: str) -> dict[str, Any]:
        assert self.store is not None, "only rank 0 may be without a store"  # noqa: S101
        deadline = time.monotonic() + self.timeout_seconds
        # A blocking read would hold the store's one connection for minutes, and hear no signal.
        while not self.store.check([name]):
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"rank {self.facts.rank} of {self.facts.world_size} waited {self.timeout_seconds:g} s for rank 0",
                    code="FG706",
                    hint="look at what rank 0 printed",
                )
            time.sleep(_POLL_SECONDS)
        told = json.loads(self.store.get(name))
        return dict(told)


def _kill_in_a_second(process: int) -> None:
    """Kills a process that hears no other signal: torchrun would wait half a minute for it.

    It must not end before this one, which is the first that failed and has told why.
    """
    nowhere = subprocess.DEVNULL
    words = ["/bin/sh", "-c", f"sleep 1; kill -KILL {process}"]
    with suppress(OSError):
        subprocess.Popen(words, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere)  # noqa: S603


def _note(error: BaseException, text: str) -> None:
    """Adds a line to an error: an error of ours is drawn from its fields, any other from its notes."""
    if isinstance(error, ForgatherError):
        error.context = (*error.context, text)
    else:
        error.add_note(text)


def join(*, timeout_seconds: float = 300) -> Member:
    """Meets the other processes of this run.

    Raises:
        DistributedError: FG706 where they cannot be met, FG701 for variables that make no sense.
    """
    facts, folder = process_facts(), launcher_folder()
    try:
        store = meeting_store(facts, timeout_seconds)
    except (RuntimeError, ValueError, OSError) as error:
        host, port = facts.master or ("", 0)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DistributedError(
            f"rank {facts.rank} of {facts.world_size} cannot meet the others at {host}:{port}: {reason[:200]}",
            code="FG706",
            hint=_how_to_meet(reason),
        ) from error
    if store is None:
        if facts.world_size > 1:
            raise DistributedError(
                f"rank {facts.rank} of {facts.world_size} was not told where the others are: MASTER_ADDR is not set",
                code="FG706",
                hint="start the processes with torchrun, which sets it",
            )
        return Member(facts, None, timeout_seconds, folder=folder)
    return Member(
        facts,
        _named(store, facts),
        timeout_seconds,
        folder=folder,
        connect=lambda: _named(store.clone(), facts),  # type: ignore[attr-defined]
    )


def _named(store: TCPStore, facts: ProcessFacts) -> Store:
    # A store outlives an attempt: what its processes write stands under its name.
    return PrefixStore(f"forgather/attempt_{facts.attempt or 0}", store)


def _how_to_meet(reason: str) -> str:
    if "EADDRINUSE" in reason or "in use" in reason:
        return "something else uses that port: give another with --master-port"
    return "start every process with one launcher (torchrun), and check that the machine can be reached"
