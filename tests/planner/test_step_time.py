"""The time of a step: operators at their roofs, rings, overlap and bubbles as bounds; runs and deadlines."""

from dataclasses import replace

import pytest

from forgather.cli.main import main
from forgather.errors import PlanError
from forgather.ml.planner.pipeline_step import schedule_seconds
from forgather.planner.device_count import fewest_machines
from forgather.planner.efficiency import Efficiency, Range
from forgather.planner.fit import RankFit
from forgather.planner.hardware import Hardware
from forgather.planner.run_time import check_amounts, check_device, machines_for, run_time
from forgather.planner.step_time import message_seconds, step_time
from forgather.planner.work import ON_HOST, TO_DEVICE, TO_HOST, Message, Operation, RankWork, RunWork

ONE = Range(1, 1)
EXACT = Efficiency(
    compute=ONE, memory=ONE, communication=ONE, call_seconds=Range(), message_seconds=Range(), network_seconds=Range()
)
# 1 T operations and 1 G bytes a second; links of 100 M bytes a second, networks of 10 M.
DEVICE = Hardware(
    name="x",
    title="x",
    peak_flops={"bf16": 1e12},
    memory_bytes_per_second=1e9,
    links={"nvlink": 1e8, "network": 1e7},
)


def matrix(phase, flops=int(1e12)):
    return Operation(phase, "aten.mm", "bfloat16", flops, 10)


def work(operations, messages=None, *, world=1, local=8, **changes):
    one = RankWork(ranks=(0, world - 1), stages=(), operations=operations, messages=messages or {})
    sizes = {"rows_per_update": 2, "tokens_per_row": 5, "num_updates": 36, "schedule": None, "micro_batches": 1}
    values = {"local_world_size": local, "schedule_runs": 1, "ranks": (one,), **sizes, **changes}
    return RunWork(world_size=world, **values)


def planned(given, efficiency=EXACT):
    return step_time(given, DEVICE, efficiency, simulate=schedule_seconds)


def test_each_operator_takes_the_time_of_its_roof():
    step = planned(
        work(
            {
                matrix("forward"): 2,
                matrix("backward"): 4,
                matrix("recompute"): 1,
                matrix("evaluation"): 100,
                Operation("forward", "aten.add", "bfloat16", 0, int(3e9)): 1,
                Operation("backward", "aten._flash_attention_backward", "bfloat16", int(5e12), 0): 1,
                Operation("update", "aten.add", "float32", 0, int(1e9)): 2,
            }
        )
    )
    rows = {kind: seconds.low for kind, seconds in step.rows.items()}
    wanted = {"matrix products": 6, "attention": 5, "elementwise": 3, "recomputation": 1, "optimizer": 2}
    assert wanted == rows
    assert Range(17, 17) == step.seconds
    # One of the five products of the backward pass of attention computes the scores again.
    assert (10e12, 12e12) == (step.model_flops, step.executed_flops)
    assert step.mfu.low == pytest.approx(10 / 17)
    assert step.tokens_per_second.high == pytest.approx(10 / 17)


def test_efficiencies_and_calls_widen_the_range():
    worse = Efficiency(compute=Range(0.5, 1), memory=ONE, call_seconds=Range(0, 3))
    step = planned(work({matrix("forward"): 1, matrix("forward", 1): 1}), worse)
    assert (pytest.approx(1), pytest.approx(3 + 3)) == (step.seconds.low, step.seconds.high)


def test_an_offloaded_optimizer_takes_the_time_of_the_host_and_of_its_link():
    device = replace(DEVICE, links={**DEVICE.links, "pcie": 1e9})
    operations = {matrix("forward"): 1, Operation(ON_HOST, "aten.mul", "float32", 0, int(51.2e9)): 1}
    messages = {
        Message("forward", TO_DEVICE, int(3e9), 1): 1,
        Message("backward", TO_HOST, int(1e9), 1): 1,
        Message("update", TO_DEVICE, int(1e9), 1): 2,
    }
    given = work(operations, messages, world=2, local=2)
    step = step_time(given, device, EXACT, simulate=schedule_seconds)
    # Two processes share the memory of the host, of which between 0.6 and 0.9 are reached.
    optimizer = step.rows["optimizer"]
    assert (pytest.approx(2 * 51.2 / 921.6 / 0.9), pytest.approx(2 / 0.6)) == (optimizer.low, optimizer.high)
    # One of four seconds of copies passes behind the second of computation; those of the update never do.
    assert Range(3 + 2, 4 + 2) == step.rows["copies to and from the host"]
    assert "its own link to the host, of 1 GB/s" in " ".join(step.assumptions)
    unknown = planned(given)
    assert pytest.approx(6 / 16) == unknown.rows["copies to and from the host"].high
    assert "because none is known" in " ".join(unknown.assumptions)


def test_a_plan_says_that_its_peak_rate_was_not_verified():
    given = work({matrix("forward"): 1})
    for unverified, said in (((), False), (("fp32",), False), (("bf16",), True)):
        step = step_time(given, replace(DEVICE, unverified=unverified), EXACT, simulate=schedule_seconds)
        assert said is ("the bf16 rate of x was not found in a document" in step.assumptions)


def test_processors_move_messages_and_compute_in_turn():
    messages = {Message("backward", "c10d.allreduce_", int(1e8), 2): 1}
    given = work({matrix("backward"): 5}, messages, world=2)
    beside, in_turn = (
        step_time(given, replace(DEVICE, kind=kind), EXACT, simulate=schedule_seconds) for kind in ("cuda", "cpu")
    )
    assert (Range(5, 6), Range(6, 6)) == (beside.seconds, in_turn.seconds)
    assert any("hides all messages" in sentence for sentence in beside.assumptions)
    assert not any("hides all messages" in sentence for sentence in in_turn.assumptions)


@pytest.mark.parametrize(
    ("name", "size", "seconds"),
    [
        ("c10d._allgather_base_", 4, 0.75),
        ("c10d._reduce_scatter_base_", 4, 0.75),
        ("c10d.allreduce_", 4, 1.5),
        ("_c10d_functional.all_reduce", 4, 1.5),
        ("c10d.send", 4, 1.0),
        ("c10d.broadcast_", 4, 1.0),
        ("c10d.allreduce_", 1, 0.0),
        # 16 ranks of two machines: the eight adapters of a machine are slower than its links.
        ("c10d._allgather_base_", 16, 15 / 16 / 0.8),
    ],
)
def test_messages_take_the_time_of_a_ring(name, size, seconds):
    found = message_seconds(Message("forward", name, int(1e8), size), DEVICE, EXACT, local_world_size=8)
    assert Range(pytest.approx(seconds), pytest.approx(seconds)) == found


def test_groups_across_machines_use_the_network():
    across = Message("forward", "c10d.allreduce_", int(1e8), 2, 8)
    shared = Hardware(**{**DEVICE.as_data(), "network_is_shared": True})
    assert message_seconds(across, DEVICE, EXACT, local_world_size=8).low == pytest.approx(10)
    assert message_seconds(across, shared, EXACT, local_world_size=8).low == pytest.approx(80)


def test_a_ring_waits_longer_than_a_tree():
    slow = Efficiency(message_seconds=ONE)
    found = message_seconds(Message("forward", "c10d._allgather_base_", 0, 8), DEVICE, slow, local_world_size=8)
    assert Range(3, 7) == found


def test_sharding_is_hidden_in_the_lower_bound_only():
    gather = {Message("forward", "c10d._allgather_base_", int(2e8), 2): 3}
    blocking = {Message("forward", "_c10d_functional.all_reduce", int(1e8), 2): 2}
    assert Range(5, 8) == planned(work({matrix("forward"): 5}, gather, world=2)).seconds
    assert Range(3, 4) == planned(work({matrix("forward"): 1}, gather, world=2)).seconds
    assert Range(7, 7) == planned(work({matrix("forward"): 5}, blocking, world=2)).seconds


def test_a_pipeline_has_the_bubble_of_its_schedule():
    stages = tuple(
        RankWork(
            ranks=(rank, rank), stages=(rank,), operations={matrix("forward"): 4, matrix("backward"): 8}, messages={}
        )
        for rank in range(2)
    )
    given = work({}, world=2, ranks=stages, schedule="ScheduleGPipe", micro_batches=4)
    step = planned(given)
    # (p - 1) / (m + p - 1) of the step is idle.
    assert step.rows["bubble"].low == pytest.approx(step.seconds.low / 5)
    assert step.seconds.low == pytest.approx(15)
    twice = work({}, world=2, ranks=stages, schedule="ScheduleGPipe", micro_batches=2, schedule_runs=2)
    assert planned(twice).seconds.low == pytest.approx(18)


def test_runs_take_steps_and_devices():
    given = work({matrix("forward"): 100}, world=4)
    step = planned(given)
    run = run_time(given, step, tokens=None, price=3.0)
    assert (36, 360, ONE, Range(4, 4), Range(12, 12)) == (
        run.num_updates,
        run.tokens,
        run.hours,
        run.gpu_hours,
        run.price,
    )
    assert 2 == run_time(given, step, tokens=11, price=None).num_updates
    # A token takes 40 device seconds: 17,280 of them take 8 device days, one day of a machine with 8 devices.
    assert ONE == machines_for(given, step, tokens=17280, days=1)
    assert Range(2, 2) == machines_for(given, step, tokens=17281, days=1)


def fits(need, memory=10):
    return [
        RankFit(
            ranks=(0, 0), peak_bytes=need, overheads=(), held_bytes=0, memory_bytes=memory, largest="x", largest_bytes=1
        )
    ]


@pytest.mark.parametrize(
    ("sizes", "machines"),
    [
        # 4 bytes stay, 24 are sharded.
        ([(2, fits(16)), (4, fits(10))], 4),
        ([(1, fits(28)), (8, fits(7))], 4),
        ([(1, fits(8)), (8, fits(5))], 1),
        ([(1, fits(12)), (8, fits(12))], None),
        ([(2, fits(20)), (4, fits(16))], None),
        ([(2, fits(9)), (2, fits(9))], 2),
        ([(2, ()), (4, ())], None),
    ],
)
def test_machines_for_memory_follow_from_two_plans(sizes, machines):
    assert machines == fewest_machines(sizes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "0"], "--tokens is 0"),
        (["--price", "nan"], "--price is nan"),
        (["--days", "3", "--hardware", "h200"], "--days needs the tokens"),
    ],
)
def test_contradictions_of_amounts_are_refused(options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 1 == main(["plan", *options])
    told = capsys.readouterr().err
    assert "error[FG991]" in told
    assert words in told


def test_amounts_that_fit_are_taken():
    amounts = {"tokens": 1e9, "days": 2.0, "price": None}
    check_amounts(**amounts)
    check_device(amounts, DEVICE)


@pytest.mark.parametrize("name", ["tokens", "days", "price"])
def test_amounts_need_a_device_with_rates(name):
    check_device({name: None}, None)
    with pytest.raises(PlanError, match=f"--{name} needs a device") as caught:
        check_device({name: 1.0}, None)
    assert "FG991" == caught.value.code
    with pytest.raises(PlanError) as caught:
        check_device({name: 1.0}, Hardware(name="x", title="x"))
    assert "FG990" == caught.value.code


def test_a_device_without_rates_has_no_time():
    with pytest.raises(PlanError, match="no memory bandwidth") as caught:
        step_time(work({matrix("forward"): 1}), Hardware(name="x", title="x"), EXACT, simulate=schedule_seconds)
    assert "FG990" == caught.value.code
