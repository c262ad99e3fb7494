"""Whether a plan fits on a device: three verdicts at their borders, and assumed rows."""

import pytest

from forgather.cli.plan_output import fit_lines
from forgather.errors import PlanError
from forgather.planner.fit import (
    Overhead,
    RankFit,
    Verdict,
    fit_plan,
    largest_peak,
    overheads,
    refuse_without_room,
    worst_fit,
)
from forgather.planner.hardware import Hardware

GIB = 2**30


def plan(rows, *, mesh=None, strategy="SingleDevice", trainable=10, **settings):
    rows = [{"name": name, "num_bytes": size} for name, size in rows.items()]
    phases = [{"phase": "training step", "at": "update", "rows": rows}, {"phase": "evaluation", "at": "", "rows": []}]
    return {
        "mesh": mesh or {"replicate": 1, "shard": 1},
        "strategy": strategy,
        "parameters": 10,
        "trainable": trainable,
        "settings": {"per_device_train_batch_size": 4, **settings},
        "ranks": [{"ranks": (0, 0), "phases": phases}],
    }


def fit(peak, memory, **options):
    (found,) = fit_plan(plan({"activations": peak}), Hardware(name="x", title="x", memory_bytes=memory), **options)
    return found


def test_the_verdict_changes_where_the_bounds_are():
    peak = 10 * GIB
    least, most = fit(peak, 1).least, fit(peak, 1).most
    assert peak < least < most
    assert fit(peak, most).verdict is Verdict.FITS
    assert fit(peak, most - 1).verdict is Verdict.MAY_FIT
    assert fit(peak, least).verdict is Verdict.MAY_FIT
    assert fit(peak, least - 1).verdict is Verdict.TOO_LARGE


def test_what_others_hold_counts():
    most = fit(GIB, 1).most
    assert fit(GIB, most + 5, held_bytes=5).verdict is Verdict.FITS
    assert fit(GIB, most + 5, held_bytes=6).verdict is Verdict.MAY_FIT


def test_a_processor_has_no_overheads():
    assert () == overheads("cpu", GIB, {"replicate": 8})
    (found,) = fit_plan(plan({"logits": 8}), Hardware(name="x", title="x", kind="cpu", memory_bytes=8))
    assert (found.least, found.most, found.verdict) == (8, 8, Verdict.FITS)


def test_each_axis_of_the_mesh_has_a_communicator():
    def nccl(**mesh):
        return [row.most for row in overheads("cuda", 0, mesh) if row.name == "NCCL buffers"]

    assert [] == nccl(replicate=1)
    assert [2 * one for one in nccl(shard=4)] == nccl(shard=4, tensor=2) != []


def test_workspaces_of_convolutions_are_between_none_and_a_copy_of_the_largest():
    def bounds(size):
        device = Hardware(name="x", title="x", memory_bytes=GIB)
        found = fit_plan({**plan({"logits": 8}), "convolution_bytes": size}, device)[0].overheads
        return [(row.least, row.most) for row in found if row.name == "workspaces of convolutions"]

    assert ([], [(0, 100)]) == (bounds(0), bounds(100))
    sizes = [largest_peak(Hardware(name="x", title="x", memory_bytes=9 * GIB), {}, convolution_bytes=n) for n in (0, 9)]
    assert sizes[0] > sizes[1] > sizes[0] - 10


def test_no_memory_no_answer():
    assert () == fit_plan(plan({"logits": 8}), Hardware(name="x", title="x"))


def lines(peak, memory):
    found = fit(peak, memory, held_bytes=GIB)
    hardware = Hardware(name="x", title="our device", memory_bytes=memory).as_data()
    return "\n".join(fit_lines({"hardware": hardware, "held_bytes": GIB, "ranks": [found.as_data()]}, 1))


def test_the_answer_in_words():
    assert "our device: 80.0 GiB a device, of which 1.0 GiB are held already" in lines(GIB, 80 * GIB)
    assert "each process: fits. It needs 1.3 GiB to 2.4 GiB; at least 76.6 GiB stay free" in lines(GIB, 80 * GIB)
    assert "too much" in lines(60 * GIB, 62 * GIB)
    text = lines(80 * GIB, 80 * GIB)
    assert "does not fit. It needs 81.1 GiB to 105.1 GiB; at least 2.1 GiB too much" in text
    assert "largest row is activations, 80.0 GiB" in text
    assert "ways out" not in text


def test_without_a_device_nothing_is_said():
    assert [] == fit_lines(None, 1)
    memoryless = Hardware(name="x", title="a processor", kind="cpu").as_data()
    assert "does not say what fits" in fit_lines({"hardware": memoryless, "held_bytes": 0, "ranks": []}, 1)[-1]


def test_the_rank_that_decides_has_the_worst_verdict():
    def fit(least, more):
        over = (Overhead(name="a", least=0, most=more, basis="a test"),)
        sizes = {"held_bytes": 0, "memory_bytes": 10, "largest": "a", "largest_bytes": 1}
        return RankFit(ranks=(0, 0), peak_bytes=least, overheads=over, **sizes)

    large, wide = fit(9, 0), fit(8, 4)
    assert (Verdict.FITS, Verdict.MAY_FIT) == (large.verdict, wide.verdict)
    assert wide == worst_fit([large, wide]) == worst_fit([wide, large])
    assert worst_fit([]) is None


def test_a_device_without_room_for_tensors_says_what_takes_it():
    small = Hardware(name="small", title="a small device", memory_bytes=2**30)
    with pytest.raises(PlanError) as caught:
        refuse_without_room(small, {"data_parallel": 2})
    assert caught.value.code == "FG992"
    assert caught.value.message.startswith("of a small device, 1.0 GiB are free, and a process may need 2.1 GiB before")
    assert "NCCL buffers 1000.0 MiB" in caught.value.hint
    refuse_without_room(Hardware(name="large", title="a large device", memory_bytes=2**32), {"data_parallel": 2})
