"""Records what small scripts come to under Lightning itself, in the file that the tests of our trainer read.

    make oracles

Needs lightning, lightning-utilities and torchmetrics on the path, which the project itself does not.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.lightning import scripts  # noqa: E402

FILE = ROOT / "tests/lightning/recorded/lightning_runs.json"


def main() -> None:
    import lightning as L

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for case in scripts.CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[case.__name__] = case(L, folder)
    with tempfile.TemporaryDirectory() as folder:
        scripts.on_two_ranks(L, folder, strategy="ddp_fork", devices=2, accelerator="cpu")
        found["on_two_ranks"] = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(2)]
    versions = {name: version(name) for name in ("lightning", "torchmetrics", "torch")}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"versions": versions, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
