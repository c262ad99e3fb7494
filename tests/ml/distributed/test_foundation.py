"""Layout, process group and mesh: the foundation of every strategy."""

import pytest
import torch
import torch.distributed as dist

from forgather.errors import DistributedError
from forgather.ml.distributed import stack_dump
from forgather.ml.distributed.collectives import require_equal_weights
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.group import shutdown, start_fake_group
from forgather.ml.distributed.layout import Layout, Position
from forgather.ml.distributed.mesh import Mesh
from tests.ml.distributed.gang import RankFailed, run_ranks


def test_sizes_that_are_left_out_are_inferred():
    assert Layout(data_parallel_size=4) == Layout.for_world(4)
    assert Layout(data_parallel_size=2, pipeline_parallel_size=2) == Layout.for_world(4, pipeline=2)
    assert Layout(pipeline_parallel_size=4) == Layout.for_world(4, pipeline=None)
    assert Layout(data_parallel_size=2, tensor_parallel_size=2, shard_size=2) == Layout.for_world(
        4, tensor=2, shard=None
    )


@pytest.mark.parametrize("asked", [{"data": 3}, {"pipeline": 3}, {"data": 2, "pipeline": None, "tensor": 4}])
def test_sizes_that_do_not_make_the_world_are_refused(asked):
    with pytest.raises(DistributedError, match="does not give the 4 processes") as caught:
        Layout.for_world(4, **asked)
    assert caught.value.code == "FG704"


def test_a_shard_size_that_does_not_divide_is_refused():
    with pytest.raises(DistributedError, match="over 3 of 4 replicas"):
        Layout(data_parallel_size=4, shard_size=3)


def test_tensor_ranks_lie_next_to_each_other_and_stages_far_apart():
    layout = Layout(data_parallel_size=2, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert [Position(0, 0, 0), Position(0, 0, 1), Position(0, 1, 0)] == [layout.position(rank) for rank in range(3)]
    assert Position(1, 0, 0) == layout.position(4)


def _sums_over_axes():
    environment = DistributedEnvironment(timeout_seconds=20, start_timeout_seconds=20)
    device = environment.start(use_cpu=True)
    DistributedEnvironment().start(use_cpu=True)  # a second one is the same group
    mesh = Mesh.create(Layout.for_world(4, pipeline=2, shard=1), device.type)
    found = []
    for group in (mesh.pp_group, mesh.dp_group, mesh.tp_group):
        value = torch.tensor(float(environment.rank))
        dist.all_reduce(value, group=group)
        found.append(value.item())
    environment.shutdown()
    environment.shutdown()
    return found, dist.is_initialized()


def test_axes_of_a_mesh_group_the_right_ranks():
    expected = [[2.0, 1.0, 0.0], [4.0, 1.0, 1.0], [2.0, 5.0, 2.0], [4.0, 5.0, 3.0]]
    assert [(sums, False) for sums in expected] == run_ranks(4, _sums_over_axes)


def _timeouts_of_groups():
    environment = DistributedEnvironment(timeout_seconds=21, start_timeout_seconds=20)
    mesh = Mesh.create(Layout.for_world(4, pipeline=2, shard=1), environment.start(use_cpu=True).type)
    groups = (mesh.pp_group, mesh.dp_group, mesh.tp_group, mesh.stages_and_replicas(), mesh.shards.get_group(0))
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_groups_of_some_processes_wait_as_long_as_that_of_all():
    assert run_ranks(4, _timeouts_of_groups) == [[21.0] * 5] * 4


def _rows_of_shards():
    """Returns (offset of a shard in a save, first row of a shard that an operator cut) of the process's own rank."""
    from torch.distributed.checkpoint.planner_helpers import _create_write_items
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, rows = init_device_mesh("cpu", (2,)), torch.arange(64.0).reshape(8, 8)
    shard = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None).detach()
    whole = distribute_tensor(rows, mesh, [Replicate()], src_data_rank=None).detach()
    (item,) = _create_write_items("weight", shard)
    return tuple(item.index.offset), whole.redistribute(placements=[Shard(0)]).to_local()[0, 0].item()


OF_RANKS = [((0, 0), 0.0), ((4, 0), 32.0)]


def _rows_of_a_rank():
    environment = DistributedEnvironment(timeout_seconds=20, start_timeout_seconds=20)
    environment.start(use_cpu=True)
    return _rows_of_shards()


@pytest.mark.parametrize("planned", [0, 1])
def test_no_operator_returns_an_earlier_mesh(planned):
    start_fake_group(planned, 2)
    try:
        assert OF_RANKS[planned] == _rows_of_shards()
    finally:
        shutdown()
    # Ranks that are forked after a plan, as those of a notebook, and then a plan as the other rank.
    assert OF_RANKS == run_ranks(2, _rows_of_a_rank)
    start_fake_group(1 - planned, 2)
    try:
        assert OF_RANKS[1 - planned] == _rows_of_shards()
    finally:
        shutdown()


def test_no_operator_returns_a_mesh_of_a_group_that_others_ended():
    start_fake_group(0, 2)
    assert OF_RANKS[0] == _rows_of_shards()
    dist.destroy_process_group()
    assert OF_RANKS == run_ranks(2, _rows_of_a_rank)
    start_fake_group(1, 2)
    try:
        assert OF_RANKS[1] == _rows_of_shards()
    finally:
        shutdown()


def _fails_on_rank_one():
    if DistributedEnvironment().rank == 1:
        raise ValueError("of rank one")


def test_the_gang_names_the_rank_that_raised():
    with pytest.raises(RankFailed, match="(?s)rank 1 raised.*of rank one"):
        run_ranks(2, _fails_on_rank_one)


def test_a_backend_that_is_missing_is_named():
    def start():
        DistributedEnvironment(backend="mpi").start(use_cpu=True)

    with pytest.raises(RankFailed, match=r"FG705.*without the backend 'mpi'|without the backend 'mpi'"):
        run_ranks(2, start)


def _waits_alone():
    if DistributedEnvironment().rank == 0:
        DistributedEnvironment(start_timeout_seconds=1).start(use_cpu=True)


def test_peers_that_do_not_come_are_an_error_in_time():
    with pytest.raises(RankFailed, match="rank 0 of 2 cannot connect to the others at 127.0.0.1") as caught:
        run_ranks(2, _waits_alone, timeout=20)
    assert "FG706" in str(caught.value)


def test_ranks_that_wait_in_different_exchanges_are_distinguished():
    def state(name, shape):
        collective = {"name": name, "number": 20, "shapes": [shape], "group": "default_pg"}
        return {"step": 2, "phase": "update", "collective": collective, "stack": []}

    assert {0: "all_reduce of shape [[3]]", 1: "broadcast of shape [[5]]"} == stack_dump.mismatched_collectives(
        {0: state("all_reduce", [3]), 1: state("broadcast", [5]), 2: None}
    )
    assert {} == stack_dump.mismatched_collectives({0: state("all_reduce", [3]), 1: state("all_reduce", [3])})
    assert {} == stack_dump.mismatched_collectives({0: state("send 0->1", [3]), 1: state("recv 1<-0", [4])})


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"a": [3], "b": [2, 2]}, "weight 1 is b of shape [2] on rank 0 and b of shape [2, 2] on rank 1"),
        ({"a": [3]}, "weight 1 is b of shape [2] on rank 0 and none on rank 1"),
        ({"a": [3], "b": [2], "c": [1]}, "weight 2 is none on rank 0 and c of shape [1] on rank 1"),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(other, told):
    said = run_ranks(2, _refusal_of_other_weights, other)

    assert [told, told] == [one.partition("processes: ")[2].partition(" (")[0] for one in said]


def _refusal_of_other_weights(other):
    environment = DistributedEnvironment(timeout_seconds=20, start_timeout_seconds=20)
    environment.start(use_cpu=True)
    try:
        require_equal_weights(other if environment.rank else {"a": [3], "b": [2]})
    except DistributedError as error:
        assert "FG855" == error.code
        return str(error)
    return ""
