"""Records a file that W&B writes offline, with what was logged, for the tests of `fgcli runs import wandb`."""

import base64
import glob
import json
import os
import tempfile
from pathlib import Path

RECORD = Path(__file__).parents[2] / "tests/runs/recorded/wandb_file.json"
CONFIG = {"learning_rate": 1e-3, "optimizer": {"name": "adamw", "betas": [0.9, 0.95]}, "api_key": "planted-3f9a7c21"}
LOGGED = [{"train/loss": 5.0 / step, "train/global_step": 10 * step, "note": f"step {step}"} for step in range(1, 6)]
LOGGED += [{"eval/loss": 1.5, "train/global_step": 50}, {"train/loss": float("nan"), "train/global_step": 60}]
# Records of several blocks of 32 KiB, and one that begins in one block and ends in another.
LOGGED += [{"train/loss": 0.5, "train/global_step": 70, "text": "x" * 20_000}]


def main():
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        settings = wandb.Settings(console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True)
        named = {"project": "oracle", "id": "abc123", "name": "first", "group": "many", "tags": ["b", "a"]}
        wandb.init(mode="offline", config=CONFIG, settings=settings, **named)
        for line in LOGGED:
            wandb.log(line)
        wandb.finish()
        # The file is whole only when the service that writes it has ended.
        wandb.teardown()
        (file,) = glob.glob("wandb/offline-run-*/run-abc123.wandb")
        content = base64.b64encode(Path(file).read_bytes()).decode()
    facts = {"versions": {"wandb": wandb.__version__}, "config": CONFIG, "logged": LOGGED, "file": content}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
