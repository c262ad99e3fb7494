"""Exchanges over the tree of groups: the values are those of one group, and sockets and messages stay few."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from forgather.errors import DistributedError
from forgather.ml.distributed import collectives, env, host_tree
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.group import shutdown, start_fake_group
from forgather.ml.distributed.host_tree import HostTree, groups_of
from tests.ml.distributed.gang import run_ranks


@pytest.mark.parametrize("fan_out", [2, 3, 8])
def test_the_groups_are_one_tree_over_all_ranks(fan_out):
    for world_size in range(2, 70):
        groups = list(groups_of(world_size, fan_out))
        levels = {rank: [ranks for ranks in groups if rank in ranks] for rank in range(world_size)}
        for rank, of_rank in levels.items():
            assert of_rank, f"rank {rank} of {world_size} is in no group"
            # A member of a further group is the first of all groups below it.
            assert all(ranks[0] == rank for ranks in of_rank[:-1])
        assert all(1 < len(ranks) <= fan_out for ranks in groups)
        assert groups[-1] == levels[0][-1]
        # A tree has one edge less than it has nodes: the groups join all ranks without a circle.
        assert sum(len(ranks) - 1 for ranks in groups) == world_size - 1


def _exchange():
    environment = DistributedEnvironment()
    environment.start(use_cpu=True)
    host_tree.FAN_OUT = 2
    rank, size = environment.rank, environment.world_size
    late = collectives.AsyncSum(float(rank + 1))
    found = {
        "gathered": collectives.all_gather({"rank": rank, "text": "x" * rank}),
        "largest": collectives.all_max(float(rank * (size - 1 - rank))),
        "from_main": collectives.broadcast_from_main([rank == 0, rank != 0]),
        "of_main": collectives.run_on_main(lambda: f"made by {rank}"),
        "on_main": collectives.gather_on_main(rank),
        "distinct": collectives.gather_distinct_on_main(rank // 3),
        "dealt": collectives.scatter_from_main(lambda: [f"for {each}" for each in range(size)]),
        "sum": late.read(),
        "again": late.read(),
    }
    with collectives.use_groups(collectives.background_groups()):
        found["behind"] = collectives.all_gather(rank)
    try:
        collectives.run_collectively(lambda: _fails_on(rank, 3))
    except Exception as error:  # noqa: BLE001 - the error of each rank is compared
        found["error"] = f"{type(error).__name__}: {error}"
    try:
        collectives.scatter_from_main(lambda: [_fails_on(rank, 0)])
    except Exception as error:  # noqa: BLE001 - the error of each rank is compared
        found["not_dealt"] = f"{type(error).__name__}: {error}"
    try:
        collectives.require_equal_facts({"seed": 1, "rows": 7 if rank == size - 1 else 8})
    except DistributedError as error:
        found["unequal"] = error.message
    collectives.require_equal_facts({"seed": 1})
    return found


def _fails_on(rank, failing):
    if rank == failing:
        raise ValueError("no file")


@pytest.mark.parametrize("world_size", [4, 5])
def test_every_rank_gets_what_one_group_would_give(world_size):
    results = run_ranks(world_size, _exchange)
    for rank, found in enumerate(results):
        assert found["gathered"] == [{"rank": each, "text": "x" * each} for each in range(world_size)]
        assert found["largest"] == max(each * (world_size - 1 - each) for each in range(world_size))
        assert found["from_main"] == [True, False]
        assert found["of_main"] == "made by 0"
        assert found["on_main"] == (list(range(world_size)) if rank == 0 else [])
        assert found["distinct"] == ([0, 1] if rank == 0 else [])
        assert found["dealt"] == f"for {rank}"
        assert found["not_dealt"].startswith("ValueError: no file" if rank == 0 else "DistributedError: ")
        assert found["sum"] == found["again"] == world_size * (world_size + 1) / 2
        assert found["behind"] == list(range(world_size))
        own = "ValueError: no file"
        told = "rank 3 failed in an operation of all processes: ValueError: no file"
        assert own == found["error"] if rank == 3 else told in found["error"]
        assert f"rows differs between processes: 8 on rank 0 and 7 on rank {world_size - 1}" in found["unequal"]


MOST = {8: 1, 64: 2, 1024: 4}
"""The number of levels that a tree of groups of 8 has."""


@pytest.mark.parametrize("world_size", MOST)
def test_sockets_and_messages_grow_with_the_logarithm(world_size, monkeypatch, record_property):
    messages = Counter()

    def counted(name, members):
        call = getattr(dist, name)

        def calls(*args, **kwargs):
            messages[name] += members(dist.get_world_size(kwargs.get("group")))
            return call(*args, **kwargs)

        monkeypatch.setattr(dist, name, calls)

    # What a member sends or receives at most: rings go round twice, the others have one message to or from each.
    counted("all_reduce", lambda size: 2 * (size - 1))
    for name in ("reduce", "broadcast", "all_gather_object", "gather_object", "broadcast_object_list"):
        counted(name, lambda size: size - 1)
    most = [0, 0]
    for rank in (0, 1, world_size // 2, world_size - 1):
        start_fake_group(rank, world_size)
        try:
            tree = HostTree(uses_default=False)
            tree.all_reduce(torch.zeros(3))
            tree.broadcast(torch.zeros(3))
            # torch also notes the groups that this rank is no member of; the default group is no group of the tree.
            noted = list(dist.distributed_c10d._world.pg_group_ranks.values())[1:]
            made = [ranks for ranks in noted if rank in ranks]
        finally:
            shutdown()
        most = [
            max(pair)
            for pair in zip(most, (sum(len(ranks) - 1 for ranks in made), sum(messages.values())), strict=True)
        ]
        assert len(made) <= MOST[world_size]
        assert sum(len(ranks) - 1 for ranks in made) <= 7 * MOST[world_size]
        assert sum(messages.values()) <= 7 * (3 * MOST[world_size])
        messages.clear()
    record_property("sockets", most[0])
    record_property("messages", most[1])


def _sockets_of_a_start(limit):
    env.FULL_MESH_LIMIT = limit
    DistributedEnvironment().start(use_cpu=True)
    collectives.all_sum(1.0)
    folder = "/proc/self/fd"
    links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}")]
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open sockets are counted in /proc")
def test_processes_of_a_large_group_connect_to_those_that_they_talk_to():
    every = run_ranks(9, _sockets_of_a_start, 9)
    few = run_ranks(9, _sockets_of_a_start, 8)
    # Rank 0 also serves the store.
    assert max(few[1:]) <= min(every[1:]) - 4
