"""What the tests of reliability share: quick or full sets, and the figures that the full ones measure.

Takes `--full`; gives the fixtures `full` and `figure`. Keeps true: a quick set writes no figure, so that the table of
docs/guarantees.md tells of full sets only.
"""

import gc
import importlib
import json
import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.ml.conftest import one_process, one_thread, settings  # noqa: F401

FIGURES = Path(__file__).parents[2] / "build" / "figures.json"


@pytest.fixture
def full(request):
    """True where the full sets are asked for: the same test with larger parameters."""
    return request.config.getoption("full")


@pytest.fixture
def figure(request, full):
    """Returns a function that notes what a test measured of a guarantee: `figure("R3", "200 kills, 0 wrong, 0 stuck")`.

    Several tests may note something of one guarantee, and one test something of several.
    """

    def note(guarantee, text):
        if full:
            _note(guarantee, request.node.nodeid, text)

    return note


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Imports here, in one small training, what every forked process would import for itself."""
    from tests.reliability import job

    torch.set_num_threads(1)
    job.trainer(tmp_path_factory.mktemp("warm"), "synchronous", max_steps=1).train()
    for module in ("strategy.data_parallel", "strategy.fsdp2", "strategy.pipeline.strategy", "trainer.accel"):
        importlib.import_module(f"forgather.ml.{module}")
    gc.freeze()  # what is here already is not looked at, and so not copied, by the children


def _note(guarantee, test, text):
    FIGURES.parent.mkdir(exist_ok=True)
    with FileLock(f"{FIGURES}.lock"):
        figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
        figures.setdefault(guarantee, {})[test] = text
        beside = FIGURES.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(figures, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(beside, FIGURES)
