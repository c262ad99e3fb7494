"""One process among those of a run: what they tell one another before there is a process group.

Takes the position of the process; gives a `Member`, through which rank 0 hands facts to all others. Keeps true: it
uses the store that the launcher keeps, and neither a device nor a collective; one process alone needs no store.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from forgather.errors import DistributedError
from forgather.ml.distributed.env import process_facts
from forgather.ml.distributed.group import meeting_store
from forgather.processes import ProcessFacts

_POLL_SECONDS = 0.01


class Member:
    """This process among the others.

    Args:
        facts: its position.
        store: where all can write and read; None for one process alone.
        timeout_seconds: how long to wait for what another process is to say.
    """

    def __init__(self, facts: ProcessFacts, store: Store | None, timeout_seconds: float) -> None:
        self.facts = facts
        self.store = store
        self.timeout_seconds = timeout_seconds

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


def join(*, timeout_seconds: float = 300) -> Member:
    """Meets the other processes of this run.

    Raises:
        DistributedError: FG706 where they cannot be met, FG701 for variables that make no sense.
    """
    facts = process_facts()
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
        return Member(facts, None, timeout_seconds)
    # What other processes write stands under a name of this attempt: a store outlives it.
    prefixed = PrefixStore(f"forgather/attempt_{facts.attempt or 0}", store)
    prefixed.set_timeout(datetime.timedelta(seconds=timeout_seconds))
    return Member(facts, prefixed, timeout_seconds)


def _how_to_meet(reason: str) -> str:
    if "EADDRINUSE" in reason or "in use" in reason:
        return "something else uses that port: give another with --master-port"
    return "start every process with one launcher (torchrun), and check that the machine can be reached"
