"""R3: `kill -9` at any moment, again and again, and the run that ends at last has the bits of one that was left alone."""

import random
import statistics
import time

import pytest

from tests.reliability import command, job
from tests.reliability.forks import Child, in_child, spread

FULL, QUICK = 200, 10
COMMANDS = 10
PER_RUN = 5
LATEST = 0.7
"""Kills come within this part of a run; one that was resumed is shorter, and may end before."""


def train(folder, kind):
    job.trainer(folder, kind).train(resume_from_checkpoint="auto")


def killed(folder, kind, moment):
    """Starts or resumes a run and kills it after so many seconds; tells whether it was in time."""
    child = Child(train, folder, kind)
    time.sleep(moment)
    child.kill()
    ended = child.ended()
    assert "" == ended.error, ended.error
    return ended.signal == 9


def trial(case, clean, place, seconds):
    """Kills a run until it has been killed often enough, lets it end, and returns (kills, wrong digests)."""
    number, kind = case
    dice = random.Random(number)
    kills, round_ = 0, 0
    while kills < PER_RUN:
        folder = place / f"{number}-{round_}"
        ended_early = False
        while kills < PER_RUN and not ended_early:
            was_killed = killed(folder, kind, dice.uniform(0, LATEST * seconds[kind]))
            kills += was_killed
            ended_early = not was_killed
        wrong = job.differences(clean[kind], job.finish(folder, kind))
        assert [] == wrong, f"after {kills} kills"
        round_ += 1
    return kills


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(full, figure, tmp_path):
    kinds = list(job.KINDS)
    clean, seconds = {}, {}
    for kind in kinds:
        taken = []
        for attempt in range(3 if full else 1):
            began = time.monotonic()
            assert "" == in_child(train, tmp_path / f"clean-{kind}-{attempt}", kind).error
            taken.append(time.monotonic() - began)
        seconds[kind] = statistics.median(taken)
        clean[kind] = job.digest(tmp_path / f"clean-{kind}-0")
    wanted = FULL if full else QUICK
    cases = [(number, kinds[number % len(kinds)]) for number in range(wanted // PER_RUN)]
    began = time.monotonic()
    kills = sum(spread(trial, cases, clean, tmp_path, seconds, timeout=600))
    assert kills >= wanted
    figure("R3", f"{kills} kills of {len(cases)} runs: 0 wrong, 0 stuck ({time.monotonic() - began:.0f} s)")


@pytest.mark.timeout(900)
def test_the_real_command_is_killed_and_ends_with_the_same_bits(full, figure, tmp_path):
    """Killed at moments of the whole time that the command takes, its imports included."""
    if not full:
        pytest.skip("of the full set alone (--full): a minute or two")
    clean = command.make(tmp_path / "clean")
    began = time.monotonic()
    command.finish(clean)
    seconds = time.monotonic() - began
    dice = random.Random(3)
    kills = 0
    while kills < COMMANDS:
        bench = command.make(tmp_path / f"killed-{kills}")
        while kills < COMMANDS:
            if not command.killed(bench, dice.uniform(0.3, 0.95) * seconds):
                break
            kills += 1
        command.finish(bench)
        assert [] == job.differences(job.digest(clean / "out"), job.digest(bench / "out"))
    figure("R3", f"{kills} kills of the real command: 0 wrong, 0 stuck")
