"""The process group of this process: started once, shut down once.

Takes `GroupSettings`; gives torch's default process group. Keeps true: there is at most one, however many
environments ask for it; meeting the other processes has a timeout of its own, shorter than that of training; groups of
some of the processes wait as long as that of all; a restarted worker never reads the addresses of an earlier
attempt.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from forgather.errors import DistributedError
from forgather.launcher_env import ProcessFacts


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How the processes of a run meet.

    Args:
        facts: what the launcher said of this process.
        rank: of this process, from 0.
        world_size: number of processes.
        backend: as in `torch.distributed.init_process_group`.
        init_method: likewise.
        start_timeout_seconds: longest wait for the other processes to appear.
        timeout_seconds: longest wait for one collective during training.
    """

    facts: ProcessFacts
    rank: int
    world_size: int
    backend: str
    init_method: str
    start_timeout_seconds: float
    timeout_seconds: float


def start(settings: GroupSettings, device: torch.device) -> None:
    """Joins the other processes; does nothing where that has happened.

    Raises:
        DistributedError: FG705 for a backend that this torch lacks, FG706 where the others do not come.
    """
    global _training_timeout
    if dist.is_initialized():
        if dist.get_world_size() != settings.world_size:
            raise DistributedError(
                f"the process group has {dist.get_world_size()} processes, and the environment says "
                f"{settings.world_size}",
                code="FG701",
                hint="let one launcher start all processes",
            )
        return
    backend = settings.backend
    if not dist.is_backend_available(backend):
        raise DistributedError(
            f"this PyTorch was built without the backend {backend!r}",
            code="FG705",
            hint='give backend: "auto", or install a PyTorch that has it',
        )
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    try:
        dist.init_process_group(
            backend,
            timeout=datetime.timedelta(seconds=settings.start_timeout_seconds),
            rank=settings.rank,
            world_size=settings.world_size,
            **_meeting(settings),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_met(settings, error) from error
    _training_timeout = datetime.timedelta(seconds=settings.timeout_seconds)
    _set_pg_timeout(_training_timeout)


def training_timeout() -> datetime.timedelta | None:
    """Returns how long a process waits for its peers while it trains; None where no group was started here."""
    return _training_timeout


def wait_as_long(group: Any) -> None:
    """Has a group of some of the processes wait as long as that of all; torch gives each its own default."""
    if _training_timeout is not None:
        _set_pg_timeout(_training_timeout, group)


_training_timeout: datetime.timedelta | None = None

_stores: dict[tuple[str, int, int | None], TCPStore] = {}
_starts = 0


def meeting_store(facts: ProcessFacts, timeout_seconds: float) -> TCPStore | None:
    """Returns the store that the processes of a run meet at, made once; None where no launcher named a place.

    Raises:
        RuntimeError: nobody answers there in time, or the port is taken; as torch tells it.
    """
    if facts.master is None:
        return None
    place = (*facts.master, facts.attempt)
    if place not in _stores:
        host, port = facts.master
        _stores[place] = TCPStore(
            host,
            port,
            facts.world_size,
            facts.rank == 0 and not facts.agent_hosts_store,
            datetime.timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    return _stores[place]


def _meeting(settings: GroupSettings) -> dict[str, Any]:
    """Returns how the processes find one another."""
    global _starts
    if settings.init_method != "env://":
        return {"init_method": settings.init_method}
    facts = settings.facts
    if settings.world_size == 1 and facts.master is None:
        return {"store": HashStore()}
    store = meeting_store(facts, settings.start_timeout_seconds)
    if store is None:
        return {"init_method": "env://"}
    # torchrun keeps one store over its restarts: without a prefix of its own an attempt meets the dead one's addresses.
    _starts += 1
    return {"store": PrefixStore(f"attempt_{facts.attempt or 0}/start_{_starts}", store)}


def _not_met(settings: GroupSettings, error: Exception) -> DistributedError:
    master = settings.facts.master
    where = settings.init_method if master is None else "{}:{}".format(*master)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DistributedError(
        f"rank {settings.rank} of {settings.world_size} did not meet the others at {where}: {reason[:200]}",
        code="FG706",
        hint="start every process with one launcher (torchrun), and look at the first process that failed",
    )


def start_pretended(rank: int, world_size: int) -> None:
    """Starts a group whose other processes do not exist; whatever is gathered or received is left as it was.

    Raises:
        DistributedError: FG701 where there is a group.
    """
    if dist.is_initialized():
        raise DistributedError(
            "a dry run pretends a process group, and this process is in one",
            code="FG701",
            hint="start the dry run without a launcher",
        )
    store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)


def shutdown() -> None:
    """Leaves the other processes; does nothing where there is no group."""
    global _training_timeout
    if dist.is_initialized():
        dist.destroy_process_group()
        _training_timeout = None
