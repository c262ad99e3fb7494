"""R1, R8: a process that dies, or a disk that refuses, at any operation of any save loses nothing that was saved."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgather.errors import ForgatherError
from forgather.ml.checkpoint import verify
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from tests.reliability import faults, job
from tests.reliability.forks import in_child, spread

QUICK = 16


@dataclass
class Clean:
    """What an undisturbed run leaves and does, and what lay in its folder before."""

    digest: dict
    operations: list
    before: Path
    step_before: int


@pytest.fixture
def clean(tmp_path):
    found = {}
    for kind in job.KINDS:
        before, folder, storage = tmp_path / kind / "before", tmp_path / kind / "out", faults.Faulty()
        step_before = job.prepare(before, kind)
        shutil.copytree(before, folder)
        job.trainer(folder, kind, storage).train()
        found[kind] = Clean(job.digest(folder), storage.operations, before, step_before)
    return found


def disturb(folder, kind, fault, at, acknowledged):
    """Trains with a fault; returns (code of the error or "", struck operation)."""
    storage = faults.Faulty(fault, at)
    code = ""
    try:
        job.trainer(folder, kind, storage, [job.Acknowledged(acknowledged)]).train()
    except ForgatherError as error:
        code = error.code
    return code, storage.struck


def trial(case, clean, tmp_path):
    """Disturbs a run, looks at what is left, lets it go on to its end and compares; returns what happened."""
    kind, fault, at = case
    place = tmp_path / f"{kind}-{at}-{fault}"
    folder, acknowledged = place / "out", place / "acknowledged"
    shutil.copytree(clean[kind].before, folder)
    ended = in_child(disturb, folder, kind, fault, at, acknowledged)
    assert "" == ended.error, ended.error
    saved = job.acknowledged_in(acknowledged)
    for _, checkpoint in list_checkpoints(folder):
        verify(checkpoint)  # what can be seen is whole
    assert job.resumes_at(folder) in (saved or clean[kind].step_before, saved + 3), f"step {saved} was saved"
    assert job.may_be_exported(folder, clean[kind].digest, clean[kind].step_before)
    if isinstance(fault, faults.Kill):
        assert ended.signal == 9
        told = "killed"
    else:
        code, struck = ended.value
        assert ended.signal == 0
        assert code in ("FG609", "FG817") or (code == "" and is_optional(struck)), (code, struck)
        told = code or "went on"
        # What takes space may fail for good, and removals do not.
        assert [] == list(folder.glob(".saving-*")) or is_optional(struck), "what was not finished was left"
    assert [] == job.differences(clean[kind].digest, job.finish(folder, kind))
    shutil.rmtree(place)
    return told


def is_optional(struck):
    """Tells whether an operation may fail without loss: one that removes what nobody needs, or hides it first."""
    name, file = struck[-1]
    hides = struck[0][0] == "rename" and struck[0][1].name.startswith(".removed-")
    return name.startswith("remove_") or file.name.startswith(".removed-") or (name == "sync_folder" and hides)


def cases_of(clean, full):
    points = [(kind, at) for kind, run in clean.items() for at in range(1, len(run.operations) + 1)]
    killed = [(kind, faults.Kill(), at) for kind, at in points]
    refused = [
        (kind, faults.Refusal(number, lasting=number == faults.REFUSALS[0]), at)
        for kind, at in points
        for number in (faults.REFUSALS if full else [faults.REFUSALS[at % 3]])
    ]
    every = killed + refused
    return every if full else [every[number * len(every) // QUICK] for number in range(QUICK)]


def test_every_operation_of_a_save_may_be_the_last(clean, full, figure, tmp_path):
    cases = cases_of(clean, full)
    began = time.monotonic()
    told = spread(trial, cases, clean, tmp_path, timeout=3600)
    seconds = time.monotonic() - began
    killed = told.count("killed")
    refused = len(told) - killed
    counts = ", ".join(f"{len(run.operations)} {kind}" for kind, run in clean.items())
    figure("R1", f"{killed} of {killed} kills, one at each operation ({counts}): the same bits ({seconds:.0f} s)")
    figure("R8", f"{refused} of {refused} refusals (ENOSPC, EIO, EACCES at each operation): reported, the same bits")
    assert len(told) >= (600 if full else QUICK)


def test_control_a_fault_is_seen(clean, tmp_path):
    """The comparison finds a run that drew other random numbers."""
    folder = tmp_path / "other"
    job.trainer(folder, "synchronous", seed=1).train()
    names = job.differences(clean["synchronous"].digest, job.digest(folder))
    assert any(name.startswith("optimizer") for name in names)
    assert any(name.startswith("export/") for name in names)
    assert any("log_history" in name for name in names)
    assert 3 == len(list_checkpoints(folder))
