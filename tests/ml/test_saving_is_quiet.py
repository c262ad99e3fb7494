"""Saving a model says nothing of libraries that the run has no part in."""

import subprocess
import sys

from tests.patience import patience

SAVES = """
import sys
from pathlib import Path
from forgather.ml.checkpoint import LocalStorage
from forgather.ml.trainer.model_export import export_model
from tests.ml.fixtures import tiny_llama

model = tiny_llama()
export_model(LocalStorage(), model, model.state_dict(), Path(sys.argv[1]), None)
"""


def test_deepspeed_does_not_warn_of_a_missing_device(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SAVES, str(tmp_path)], capture_output=True, text=True, timeout=patience(120)
    )
    assert (0, "") == (done.returncode, done.stdout), done.stderr
    assert "accelerator" not in done.stderr
    assert (tmp_path / "model.safetensors").is_file()
