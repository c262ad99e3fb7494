"""The snippets of a guide to Lightning: each runs with `forgather.lightning` in its place, or is answered at a line of it.

The machine is a stand-in: it says that it has eight GPUs. What trains does so on the CPU. The first line of a snippet says
that it runs, or at which line it is answered, and how.
"""

import re
import sys
import traceback
import types
from pathlib import Path

import pytest
import torch

import forgather.lightning as L
from forgather.errors import ForgatherError
from forgather.lightning import words
from tests.lightning import scripts

SNIPPETS = sorted((Path(__file__).parent / "lightning").glob("*.py.txt"))
ANSWERED = re.compile(r"# answered at line (\d+): (.*)")


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    pytorch = types.ModuleType("lightning.pytorch")
    pytorch.strategies = pytorch.callbacks = L
    for name, module in {"": L, ".pytorch": pytorch, ".pytorch.strategies": L, ".pytorch.callbacks": L}.items():
        monkeypatch.setitem(sys.modules, f"lightning{name}", module)
    monkeypatch.setattr(words, "_count_devices", lambda accelerator: 1)
    monkeypatch.setattr(words, "_missing_devices", lambda accelerator: [])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("deepspeed_config.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    L.seed_everything(7)
    kind = scripts.regression(L)
    return {
        "L": L,
        "torch": torch,
        "Regression": kind,
        "model": kind(),
        "dataset": scripts.rows(),
        "train_loader": scripts.loaders()[0],
    }


# Of a snippet that asks for page-locked memory, which a machine without a GPU does not have.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("file", SNIPPETS, ids=lambda file: file.name.removesuffix(".py.txt"))
def test_a_snippet_runs_or_is_answered_at_its_line(file, namespace):
    text = file.read_text(encoding="utf-8")
    code = compile(text, str(file), "exec")
    answer = ANSWERED.match(text)
    if answer is None:
        assert text.startswith("# runs\n")
        exec(code, namespace)
        return
    with pytest.raises(ForgatherError, match=answer[2]) as caught:
        exec(code, namespace)
    lines = [frame.lineno for frame in traceback.extract_tb(caught.tb) if frame.filename == str(file)]
    assert int(answer[1]) == lines[-1]
