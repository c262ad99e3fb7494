"""Records what small scripts come to under Lightning itself, in the file that the tests of our trainer read.

It also runs the scripts by our trainer with modules, callbacks and data modules of Lightning's own classes, which the
tests cannot import, and ends with an error where these come to something else.

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
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.lightning import scripts  # noqa: E402
from tests.lightning.comparison import differences, plain  # noqa: E402

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
    compare_own_classes(L, found)
    versions = {name: version(name) for name in ("lightning", "torchmetrics", "torch")}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"versions": versions, "runs": found}, indent=1) + "\n")


def compare_own_classes(L: Any, recorded: dict[str, Any]) -> None:
    import forgather.lightning as ours

    logging.disable(logging.WARNING)
    theirs = {name: getattr(L, name) for name in ("LightningModule", "LightningDataModule", "Callback")}
    mixed = SimpleNamespace(
        **theirs,
        __name__="forgather.lightning",
        Trainer=ours.Trainer,
        seed_everything=ours.seed_everything,
        load_from_checkpoint=ours.load_from_checkpoint,
    )
    for case in scripts.CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = differences(plain(recorded[case.__name__]), plain(case(mixed, folder)))
        if found:
            raise SystemExit(f"{case.__name__} with Lightning's classes: {found[0]}")


if __name__ == "__main__":
    main()
