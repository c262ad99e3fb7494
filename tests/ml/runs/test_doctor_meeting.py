"""The checks between machines: each fault is found on all of them, and a missing machine is a fault, not a hang."""

import errno
import fcntl
import multiprocessing
import os
import time

import pytest

from forgather.doctor import meeting, traffic
from forgather.doctor.meeting import CHECKS, Place, between_machines
from forgather.doctor.result import State
from forgather.ml.distributed import probe
from tests.matrix import thinned

FORK = multiprocessing.get_context("fork")
CHEAP = [name for name in CHECKS if not name.startswith("all-reduce")]
SOUND = {
    "versions": {"torch": "2.13.0"},
    "git": {"commit": "abcdef0123456789", "dirty": False},
    "address": "127.0.0.1",
    "gpus": 0,
}


def free_port():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def machine(place, facts, folder, change, names, pipe):
    meeting._SEEN_SECONDS = 0.5
    if change is not None:
        change()
    pipe.send(list(between_machines(place, facts, folder, names=names)))


def meet(folder, *others, names=None, nodes=2, ranks=(0, 1), timeout=20.0):
    """Returns the results of each machine; `others` are the facts, folder and change of machines that differ."""
    port, started = free_port(), []
    for number, rank in enumerate(ranks):
        facts, own, change = others[number] if number < len(others) and others[number] else ({}, None, None)
        place = Place(nodes=nodes, rank=rank, master=("127.0.0.1", port), timeout=timeout)
        ours, theirs = FORK.Pipe(duplex=False)
        given = (place, {**SOUND, **facts}, str(own or folder), change, names or CHEAP, theirs)
        process = FORK.Process(target=machine, args=given)
        process.start()
        theirs.close()
        started.append((process, ours))
    results = []
    for process, pipe in started:
        try:
            results.append({result.name: result for result in pipe.recv()})
        except EOFError:
            results.append({})
        process.join(timeout + 10)
    return results


def test_sound_machines_have_no_fault(tmp_path):
    for results in meet(tmp_path, nodes=3, ranks=(0, 1, 2)):
        assert ["machines", *CHEAP] == list(results)
        assert {State.OK} == {result.state for result in results.values()}, results
    assert [] == list(tmp_path.iterdir())


def later_clock():
    now = time.time
    time.time = lambda: now() + 40


def no_rename():
    os.replace = lambda *_: None


def no_lock():
    fcntl.flock = lambda *_: None


def no_lock_service():
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock


FAULTS = {
    "versions": ("versions", ({"versions": {"torch": "2.12.0"}}, None, None), "torch: 2.13.0, 2.12.0"),
    "missing library": ("versions", ({"versions": {}}, None, None), "torch: 2.13.0, None"),
    "commit": ("git state", ({"git": {"commit": "0" * 40, "dirty": False}}, None, None), "abcdef0123, 0000000000"),
    "no repository": ("git state", ({"git": None}, None, None), "abcdef0123, None"),
    "clock": ("clocks", ({}, None, later_clock), "machine 1 is 40.0 s ahead"),
    "address": (
        "reachability",
        ({"address": "no-such-machine.invalid"}, None, None),
        "0 to 1 (no-such-machine.invalid)",
    ),
    "other folder": ("shared folder", ({}, "other", None), "machine 1 does not see what machine 0 writes"),
    "rename": ("shared folder", ({}, None, no_rename), "are not seen by all machines"),
    "lock": ("shared folder", ({}, None, no_lock), "machine 1 is not kept out by a lock of machine 0"),
    "lock service": ("shared folder", ({}, None, no_lock_service), "machine 1 cannot lock a file: No locks available"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_on_all_machines(fault, tmp_path):
    name, (facts, folder, change), said = FAULTS[fault]
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    # The lock that does not hold is that of machine 0.
    changed = (facts, other if folder else None, change)
    for results in (
        meet(shared, changed, names=[name]) if fault == "lock" else meet(shared, None, changed, names=[name])
    ):
        assert State.WRONG is results[name].state and results[name].fix, results
        assert said in results[name].found, results[name]
        assert State.OK is results["machines"].state
    assert [] == list(shared.iterdir())


def test_a_file_system_without_locks_is_found_on_all_machines(tmp_path):
    for results in meet(tmp_path, ({}, None, no_lock_service), names=["shared folder"]):
        assert "machine 0 cannot lock a file: No locks available" in results["shared folder"].found


def test_nccl_is_not_measured_unless_every_machine_has_a_gpu(tmp_path):
    for results in meet(tmp_path, ({"gpus": 8}, None, None), names=["all-reduce (nccl)"]):
        result = results["all-reduce (nccl)"]
        assert State.NOT_CHECKED is result.state and "not every machine has a GPU" in result.found


def test_a_folder_that_machine_0_cannot_write_to_is_found(tmp_path):
    for results in meet("/proc/1", names=["shared folder"]):
        assert "machine 0 cannot write to /proc/1" in results["shared folder"].found


def test_changes_that_are_not_committed_are_told(tmp_path):
    dirty = {"git": {**SOUND["git"], "dirty": True}}
    for results in meet(tmp_path, None, (dirty, None, None), names=["git state"]):
        assert State.NOTE is results["git state"].state and "machine 1" in results["git state"].found
    for results in meet(tmp_path, *[({"git": None}, None, None)] * 2, names=["git state"]):
        assert State.NOT_CHECKED is results["git state"].state


def test_a_machine_that_does_not_come_is_a_fault(tmp_path):
    (results,) = meet(tmp_path, ranks=(0,), timeout=1.0)
    assert State.WRONG is results["machines"].state and "not all 2 met" in results["machines"].found
    assert {State.NOT_CHECKED} == {results[name].state for name in CHEAP}
    (results,) = meet(tmp_path, ranks=(1,), timeout=1.0)
    assert State.WRONG is results["machines"].state


def test_a_rank_that_two_machines_have_is_a_fault(tmp_path):
    every = meet(tmp_path, nodes=3, ranks=(0, 1, 1), timeout=2.0)
    assert any("two machines have --node-rank 1" in results["machines"].found for results in every)
    assert all(State.WRONG is results["machines"].state for results in every)


def test_machines_that_count_differently_are_a_fault(tmp_path):
    port = free_port()
    pipes = []
    for rank, nodes in enumerate((2, 3)):
        ours, theirs = FORK.Pipe(duplex=False)
        place = Place(nodes=nodes, rank=rank, master=("127.0.0.1", port), timeout=2.0)
        FORK.Process(target=machine, args=(place, SOUND, str(tmp_path), None, [], theirs)).start()
        pipes.append(ours)
    found = [pipe.recv()[0] for pipe in pipes]
    assert [State.WRONG] * 2 == [result.state for result in found]
    assert "they count 2, 3" in found[0].found


def test_a_machine_that_leaves_is_a_fault_and_the_rest_is_not_checked(tmp_path):
    def leaves():
        meeting.CHECKS = {**CHECKS, "clocks": lambda *_: os._exit(1)}

    results, _ = meet(tmp_path, None, ({}, None, leaves), timeout=2.0)
    assert State.OK is results["versions"].state
    assert State.WRONG is results["clocks"].state and "a machine left" in results["clocks"].found
    assert {State.NOT_CHECKED} == {results[name].state for name in CHEAP[2:]}


# the all-reduce


def test_an_all_reduce_that_fails_is_a_fault(monkeypatch):
    monkeypatch.setattr(traffic, "PROBE", "forgather.ml.distributed.no_such_probe")
    result = traffic.all_reduce("gloo", ("127.0.0.1", 1), ranks=(0,), world_size=1, timeout=5)
    assert State.WRONG is result.state and "No module named" in result.found and "GLOO_SOCKET_IFNAME" in result.fix


def probed(kind, settings, change, pipe):
    if change:
        change()
    pipe.send(probe.all_reduce(**settings))


def test_the_sum_of_a_probe_is_looked_at(monkeypatch):
    """A sum that is wrong is seen: the second process contributes another number."""

    def wrong_number():
        full = probe.torch.full
        probe.torch.full = lambda size, value, **more: full(size, value + 1, **more)

    for change, is_right in ((None, True), (wrong_number, False)):
        store = probe.open_store("127.0.0.1", 0, is_host=True, timeout_seconds=20)
        pipes = []
        for rank in (0, 1):
            ours, theirs = FORK.Pipe(duplex=False)
            settings = {
                "backend": "gloo", "host": "127.0.0.1", "port": store.port, "rank": rank, "world_size": 2,
                "num_bytes": 4096, "local_rank": rank, "timeout": 20,
            }  # fmt: skip
            FORK.Process(target=probed, args=("gloo", settings, change if rank else None, theirs)).start()
            pipes.append(ours)
        found = [pipe.recv() for pipe in pipes]
        assert [is_right] * 2 == [one["is_right"] for one in found]
        assert all(0 < one["bytes_per_second"] for one in found)


@pytest.mark.parametrize(
    "answer", ['{"is_right": false, "bytes_per_second": 1e9}', '{"is_right": true, "bytes_per_second": 10}']
)
def test_a_wrong_sum_and_a_slow_one_are_told(answer, tmp_path, monkeypatch):
    (tmp_path / "stand_in_probe.py").write_text(f"print({answer!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(traffic, "PROBE", "stand_in_probe")
    result = traffic.all_reduce("nccl", ("127.0.0.1", 1), ranks=(0, 1), world_size=2, timeout=5)
    if "false" in answer:
        assert State.WRONG is result.state and "the sum is wrong" in result.found
    else:
        assert State.NOTE is result.state and "slow" in result.found


@pytest.mark.parametrize("names", thinned([["all-reduce (gloo)"]], lambda names: False))
def test_machines_sum_over_the_network_that_they_have(names, tmp_path):
    for results in meet(tmp_path, names=names, timeout=120.0):
        assert State.WRONG is not results[names[0]].state, results
        assert 1e6 < results[names[0]].values["bytes_per_second"]
