"""One rank that fails ends the job within seconds, and the first cause is told with rank, step and traceback.

The matrix is that of docs/guarantees.md, R12: six ways to fail in four phases, on alternating ranks; and R13: a hang.
The same on the real command, under torchrun, is tests/ml/distributed/test_faults.py.
"""

import itertools
import re

import pytest

from tests.ml.distributed.test_faults import CONFIG, TOY
from tests.patience import patience
from tests.project.workbench import make_project
from tests.reliability.ranks import run_command

REACH_SECONDS = 15
WAYS = ("raise", "leave", "SIGKILL", "SIGSEGV", "worker", "memory")
PHASES = {"forward": "step 1", "backward": "step 1", "save": "step 2", "eval": "step 2"}
# The rank alternates along both axes, so that each way and each phase meets both.
ALL = [
    (how, phase, (row + column) % 2)
    for (row, how), (column, phase) in itertools.product(enumerate(WAYS), enumerate(PHASES))
]
ALWAYS = [ALL[number] for number in (1, 8, 15, 22)]
TOLD = {
    "raise": "error: ValueError: of this rank",
    "memory": "error: OutOfMemoryError: out of memory",
    "worker": "error: RuntimeError: DataLoader worker",
}
STATUS = {"leave": 7, "SIGKILL": -9, "SIGSEGV": -11}


def pytest_generate_tests(metafunc):
    if "phase" in metafunc.fixturenames:
        cases = ALL if metafunc.config.getoption("full") else ALWAYS
        metafunc.parametrize(("how", "phase", "rank"), cases, ids=["-".join(map(str, case)) for case in cases])


@pytest.fixture(scope="module")
def took():
    """How long after its failure each job ended."""
    return {}


def failed(tmp_path, *words):
    bench = make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})
    return run_command(["-t", "a", "train", "--no-check", *words], bench), bench


def test_a_rank_that_fails_ends_the_job_and_is_named(tmp_path, how, phase, rank, took, figure):
    ended, _ = failed(tmp_path, "--how", how, "--phase", phase, "--rank", str(rank))
    seconds = ended.end - ended.moments[0]
    other = 1 - rank

    assert STATUS.get(how, 1) == ended.statuses[rank], ended.printed
    assert 1 == ended.statuses[other], ended.printed
    assert seconds < patience(REACH_SECONDS)
    errors = [line for line in ended.printed.splitlines() if line.startswith("error")]
    assert 1 == len(errors), ended.printed
    if how in TOLD:
        assert errors[0].startswith(TOLD[how])
        assert re.search(rf"note: rank {rank} of 2, {PHASES[phase]}, ", ended.printed)
        assert "traceback" in ended.printed
    else:
        # Nobody can tell for it but who has lost it; under a launcher of ours, that one tells how it died.
        assert re.search(rf"note: rank {other} of 2, {PHASES[phase]}", ended.printed)
        assert f"note: rank {rank} of 2 ended without an error message" in ended.printed
    took[how, phase] = seconds
    if len(took) == len(ALL):
        figure("R12", f"{len(took)} of {len(ALL)}: reported once, ended within {max(took.values()):.1f} s")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path, rank, full, figure):
    if rank == 0 and not full:
        pytest.skip("the full set has the other rank, too")
    timeout = 8 if full else 3
    words = ("--how", "one more", "--phase", "step", "--rank", str(rank), "--timeout", str(timeout))
    ended, bench = failed(tmp_path, *words)
    seconds = ended.end - ended.moments[0]

    assert [1, 1] == ended.statuses, ended.printed
    assert seconds < timeout + patience(10)
    assert 1 == sum(line.startswith("error") for line in ended.printed.splitlines()), ended.printed
    (report,) = (bench / "out/runs").glob("*/hang.txt")
    text = report.read_text()
    for one in (0, 1):
        part = text.partition(f"rank {one}: ")[2].partition("\nrank ")[0]
        assert re.search(r"step \d", part), text
        assert re.search(r"last collective: \w+ number \d+ of shape", part), text
        assert re.search(r"\.py:\d+ in ", part), text
    figure(
        "R13", f"rank {rank} makes one collective more, timeout {timeout} s: ended and reported after {seconds:.1f} s"
    )
