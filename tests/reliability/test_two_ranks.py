"""R1, R8 with two ranks: one of them dies, or its disk refuses, at any operation of a save; both end, and go on."""

import collections
import itertools
import shutil
import time

import pytest

from forgather.ml.checkpoint import verify
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from tests.patience import patience
from tests.reliability import faults, job, two_ranks
from tests.reliability.forks import spread

QUICK = ("DDP", "FSDP2, asynchronous", "pipeline")
"""What FSDP2 writes at once, it also writes in a thread."""
PROMPT = 5.0
"""Seconds within which the other rank must have ended."""


@pytest.fixture
def clean(tmp_path, full):
    """The digest of undisturbed runs, and the operations of each rank."""
    tried = two_ranks.STRATEGIES if full else QUICK
    return {strategy: two_ranks.clean(tmp_path / strategy, strategy) for strategy in tried}


def trial(case, clean, place):
    """Disturbs one rank, looks at what is left, lets both go on to the end and compares."""
    strategy, rank, at, fault = case
    folder = place / f"{strategy}-{rank}-{at}-{fault}" / "out"
    folder.parent.mkdir()
    acknowledged = folder.parent / "acknowledged"
    ended, seconds = two_ranks.disturbed(folder, strategy, fault, at, rank, [job.Acknowledged(acknowledged)])
    assert seconds is not None and seconds < patience(PROMPT), f"the ranks ended {seconds} s after the fault"
    assert [] == [end.error for end in ended if end.error]
    told = [end.value[0] if end.value else f"signal {end.signal}" for end in ended]
    if isinstance(fault, faults.Kill):
        assert "signal 9" == told[rank]
        assert "" != told[1 - rank] or ended_well(folder), told
    else:
        struck = ended[rank].value[1]
        cannot_remove = struck[-1][0].startswith("remove_")  # then the next save does
        assert cannot_remove or [] == list(folder.glob(".saving-*")), "what was not finished was left"
        assert set(told) in ({"FG609"}, {"FG817"}) or ({""} == set(told) and cannot_remove), told
    saved = job.acknowledged_in(acknowledged)
    for _, checkpoint in list_checkpoints(folder):
        verify(checkpoint)
    assert job.resumes_at(folder) in (saved, saved + 2)
    assert [] == job.differences(clean[strategy][0], two_ranks.finish(folder, strategy))
    shutil.rmtree(folder.parent)
    return seconds


def ended_well(folder):
    """The last thing that rank 0 does for all is to write; the other one may have done its part by then."""
    return job.resumes_at(folder) == two_ranks.STEPS


def points_of(operations):
    """Returns operations from the second save to the end; of the writes of a file the first, a middle and the last.

    A save begins where rank 0 makes the folder; a rank whose operations hold none begins with its own first file.
    """
    begins = [number for number, (name, file) in enumerate(operations, 1) if is_begin(name, file)]
    first = begins[-1] if begins else len(operations) // 2 + 1
    found = []
    for _, run in itertools.groupby(range(first, len(operations) + 1), key=lambda at: operations[at - 1]):
        run = list(run)
        found += sorted({run[0], run[len(run) // 2], run[-1]})
    return found


def is_begin(name, file):
    return name == "make_folder" and file.name.startswith(".saving-checkpoint-")


def cases_of(clean, full):
    cases = []
    for (strategy, (_, operations)), rank in itertools.product(clean.items(), range(2)):
        for place, at in enumerate(points_of(operations[rank])):
            cases += [
                (strategy, rank, at, fault) for fault in (faults.Kill(), faults.Refusal(faults.REFUSALS[place % 3]))
            ]
    return cases if full else quick_cases(clean)


def quick_cases(clean):
    """Returns one case of each strategy: each rank and each kind of fault, from the beginning of a save to its end."""
    cases = []
    for number, (strategy, (_, operations)) in enumerate(clean.items()):
        rank, points = number % 2, points_of(operations[number % 2])
        at = points[(2 * number + 1) * len(points) // (2 * len(QUICK))]
        cases.append((strategy, rank, at, faults.Kill() if number == 0 else faults.Refusal(faults.REFUSALS[number])))
    return cases


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_one_of_two_ranks_may_fail_at_every_operation(clean, full, figure, tmp_path):
    cases = cases_of(clean, full)
    began = time.monotonic()
    waits = spread(trial, cases, clean, tmp_path, timeout=3600)
    counts = collections.Counter((strategy, rank) for strategy, rank, _, _ in cases)
    shown = ", ".join(f"{strategy} rank {rank}: {count}" for (strategy, rank), count in counts.items())
    seconds = time.monotonic() - began
    text = f"two ranks: {len(cases)} of {len(cases)} kills and refusals ({shown}): the same bits, the other rank ended within {max(waits):.1f} s ({seconds:.0f} s)"
    figure("R1", text)
    assert len(cases) >= (130 if full else len(QUICK))
