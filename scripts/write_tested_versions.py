"""Writes the versions that `fgcli doctor` compares with: the oldest of pyproject.toml, and those of constraints.txt.

Usage:
    python scripts/write_tested_versions.py        writes forgather/doctor/tested_versions.json
"""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "forgather/doctor/tested_versions.json"
COMPARED = (
    "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "jinja2", "ruamel.yaml",
    "deepspeed", "peft", "bitsandbytes", "torchao", "trl", "diffusers", "wandb", "mlflow",
    "trackio", "aim", "comet_ml",
)  # fmt: skip


def record():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(re.fullmatch(r"([\w.-]+)>=([\w.]+)", line).groups() for line in needed)
    pinned = {
        name.lower(): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    }
    tested = {name: pinned[name] for name in COMPARED if name in pinned}
    return {"oldest": oldest, "tested": tested}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=2) + "\n", encoding="utf-8")
