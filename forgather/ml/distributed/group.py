"""The default process group: functions that initialize it once and destroy it once.

`start` takes `GroupSettings` and initializes torch's default process group. There is at most one such group, even if
several `DistributedEnvironment` objects start it. A separate timeout limits the wait for the other processes to
connect; afterwards all groups use the training timeout. A restarted process never reads addresses of an earlier
attempt.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from forgather.errors import DistributedError, first_line
from forgather.launcher_env import ProcessFacts
from forgather.ml.number_format import plural

_MOST_PROCESSES = 131_072
"""The largest fake group: meshes of torch list their ranks, which takes half a minute for so many."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The arguments for `init_process_group`.

    Args:
        facts: the position of this process, from the launcher.
        rank: the rank of this process, counted from 0.
        world_size: the number of processes.
        backend: the backend, as in `torch.distributed.init_process_group`.
        init_method: the URL of the rendezvous, as in `torch.distributed.init_process_group`.
        start_timeout_seconds: the maximum wait for the other processes to connect, in seconds.
        timeout_seconds: the maximum wait for one collective during training, in seconds.
    """

    facts: ProcessFacts
    rank: int
    world_size: int
    backend: str
    init_method: str
    start_timeout_seconds: float
    timeout_seconds: float


def start(settings: GroupSettings, device: torch.device) -> None:
    """Initializes the default process group, unless it is initialized already.

    Args:
        settings: the arguments of the process group.
        device: the device of this process.

    Raises:
        DistributedError: FG701 if an existing group has another size, FG705 if this build of torch does not have the
            backend, FG706 if the other processes do not connect in time.
    """
    global _training_timeout
    if dist.is_initialized():
        # A group of the same size is used as it is: several environments in one process share it.
        if dist.get_world_size() != settings.world_size:
            raise DistributedError(
                f"the process group has {plural(dist.get_world_size(), 'process', 'processes')}, and the environment "
                f"says {settings.world_size}",
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
    # Before the group: NCCL uses the current device, and otherwise every process would create a context on device 0.
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    try:
        dist.init_process_group(
            backend,
            timeout=datetime.timedelta(seconds=settings.start_timeout_seconds),
            rank=settings.rank,
            world_size=settings.world_size,
            # NCCL and XCCL connect the device at once, and a mesh then splits its groups off this one: one call for
            # each axis, where each rank would otherwise take part in the making of all groups of all axes.
            device_id=device if backend in ("nccl", "xccl") else None,
            **_rendezvous_arguments(settings),
        )
    except (RuntimeError, ValueError, OSError) as error:
        master = settings.facts.master
        where = settings.init_method if master is None else "{}:{}".format(*master)
        raise rendezvous_error(settings.rank, settings.world_size, where, error) from error
    _forget_earlier_meshes()
    # torch has one timeout per group. It is the short one while processes meet, so that a missing one is reported
    # early.
    _training_timeout = datetime.timedelta(seconds=settings.timeout_seconds)
    _set_pg_timeout(_training_timeout)
    if settings.world_size == 1:
        # NCCL warns of a group that still is there at the end. One process cannot wait for others by closing it.
        atexit.register(shutdown)


def training_timeout() -> datetime.timedelta | None:
    """Returns the timeout of a collective during training, or None if `start` has not initialized the group."""
    return _training_timeout


def apply_training_timeout(group: Any) -> None:
    """Sets the timeout of a subgroup to that of the default group, since torch gives each new group its own default."""
    if _training_timeout is not None:
        _set_pg_timeout(_training_timeout, group)


_training_timeout: datetime.timedelta | None = None

_stores: dict[tuple[str, int, int | None], TCPStore] = {}
_starts = 0


def rendezvous_store(facts: ProcessFacts, timeout_seconds: float) -> TCPStore | None:
    """Returns the TCP store of a run, which is created once per attempt of torchrun.

    Args:
        facts: the position of this process.
        timeout_seconds: the maximum wait for the store to answer, in seconds.

    Returns:
        The store, or None if the launcher did not set MASTER_ADDR.

    Raises:
        RuntimeError: from torch, if the store does not answer in time or its port is in use.
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
            # torchrun's agent may host the store already; otherwise rank 0 does.
            facts.rank == 0 and not facts.agent_hosts_store,
            datetime.timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    return _stores[place]


def _rendezvous_arguments(settings: GroupSettings) -> dict[str, Any]:
    """Returns the arguments of `init_process_group` for the rendezvous: a store, or the `init_method`."""
    global _starts
    if settings.init_method != "env://":
        return {"init_method": settings.init_method}
    facts = settings.facts
    if settings.world_size == 1 and facts.master is None:
        # One process alone needs no port, and no other program can be in its way.
        return {"store": HashStore()}
    store = rendezvous_store(facts, settings.start_timeout_seconds)
    if store is None:
        return {"init_method": "env://"}
    # torchrun keeps one store over its restarts. Without a prefix per attempt a process reads the addresses of a dead
    # one.
    _starts += 1
    return {"store": PrefixStore(f"attempt_{facts.attempt or 0}/start_{_starts}", store)}


def rendezvous_error(rank: int, world_size: int, where: str, error: Exception) -> DistributedError:
    """Returns the FG706 error for a process that cannot connect to the others.

    Args:
        rank: the rank of this process.
        world_size: the number of processes.
        where: the address of the rendezvous.
        error: the exception that torch raised.
    """
    # torch's messages have a C++ backtrace after the first line.
    reason = first_line(error)
    hint = "start every process with one launcher (torchrun), and look at the first process that failed"
    if "EADDRINUSE" in reason or "in use" in reason:
        hint = "another program uses that port: choose another one with --master-port"
    return DistributedError(
        f"rank {rank} of {world_size} cannot connect to the others at {where}: {reason[:200]}", code="FG706", hint=hint
    )


def start_fake_group(rank: int, world_size: int) -> None:
    """Initializes torch's fake process group for a dry run.

    The collectives of a fake process group return without changing their tensors.

    Args:
        rank: the rank of the simulated process.
        world_size: the number of simulated processes.

    Raises:
        DistributedError: FG701 if a process group exists; FG462 if there are too many processes.
    """
    if world_size > _MOST_PROCESSES:
        count = f"{world_size:,}" if world_size < 10**12 else "10^12 or more"
        raise DistributedError(
            f"a run of {count} processes cannot be planned",
            code="FG462",
            hint=f"plan at most {_MOST_PROCESSES:,} processes",
        )
    if dist.is_initialized():
        raise DistributedError(
            "a dry run makes a fake process group, and this process already has a process group",
            code="FG701",
            hint="start the dry run without a launcher",
        )
    # By name: the module belongs to torch's tests, and only a dry run needs it.
    store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    _forget_earlier_meshes()


@contextlib.contextmanager
def leaving_no_group() -> Iterator[None]:
    """Context manager that destroys a process group that was made in its body."""
    existed = dist.is_initialized()
    try:
        yield
    finally:
        if not existed:
            shutdown()


def shutdown() -> None:
    """Destroys the default process group, if there is one."""
    global _training_timeout
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_earlier_meshes()
        _training_timeout = None


# The module and the attribute of each function of torch that empties a cache of DTensor.
_MESH_CACHES = (
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
)


def _forget_earlier_meshes() -> None:
    """Empties the caches in which DTensor keeps device meshes of an earlier process group.

    torch compares meshes by their ranks, not by the rank of this process. After a plan or a dry run as another rank,
    and in a process forked after one, operators would return tensors with the earlier mesh: their shards would be
    taken for those of the other rank, with other rows in a save and in a redistribution.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in _MESH_CACHES:
        # Private to torch, so a later version may not have it; `test_no_operator_returns_an_earlier_mesh` would fail.
        with contextlib.suppress(ImportError, AttributeError):
            operator.attrgetter(name)(import_module(module))()
