"""The equalities of numbers hold with other instructions than those of this processor, too.

Libraries choose the instructions once, when a process begins: the tests run again in one that has the oldest ones.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
EXACT = ("bit_for_bit", "is_exact", "does_not_change", "does_not_depend", "are_equal", "changes_no_weight")
HERE = "tests/ml/numerics"


@pytest.mark.matrix
@pytest.mark.timeout(1200)  # a whole process of pytest
def test_equal_numbers_are_equal_with_the_oldest_instructions():
    words = ["-q", "-x", "-p", "no:cacheprovider", "-k", " or ".join(("oldest_are_in_use", *EXACT))]
    files = [f"{HERE}/test_plain_loop.py", f"{HERE}/test_instruction_sets.py::test_the_oldest_are_in_use"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files],
        cwd=ROOT,
        env={**os.environ, **OLDEST},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout


@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") != "default", reason="is for the process of the test above")
def test_the_oldest_are_in_use():
    assert "DEFAULT" == torch.backends.cpu.get_cpu_capability()
